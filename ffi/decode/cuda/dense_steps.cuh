// The four bf16 GEMMs of a layer, one piece of code: q, k, v and u; o_proj; pre_expert_proj with the router, which has
// the same operand; post_expert_proj.
#pragma once

#include "ffi/decode/cuda/operands.cuh"

namespace muse {

class DenseSteps : public OperandSteps {
 public:
  using OperandSteps::OperandSteps;

  // False: somebody gave up.
  __device__ bool gemm() {
#pragma unroll 1
    for (int i0 = 0; i0 < rows(); i0 += kPassRows) {
      if (!load(i0)) return false;
      mark(Mark::kLoad);
      const bool routed = s_.gemm == Gemm::kPreExpert;  // behind the last meeting the first thread moves on
      multiply(i0);
      if (routed) run_phase<&DenseSteps::router_dots>(i0);
    }
    if (thread_index() == 0)
      s_.gemm = s_.gemm == Gemm::kPostExpert ? Gemm::kQkvu : Gemm{static_cast<uint32_t>(s_.gemm) + 1};
    sync_block();
    return true;
  }

 protected:
  // A warp's tasks. Column-parallel results stay in the rank as segment sums. Of a row-parallel GEMM this rank's
  // columns are one segment: its partial sums go to the owners of the output columns.
  __device__ void warp_tasks(int i0) {
    const Gemm which = s_.gemm;
    const bool row_parallel = which == Gemm::kOutput || which == Gemm::kPostExpert;
    const auto index = static_cast<uint32_t>(which);
    const DenseJob& job = s_.jobs.dense[index];
    const Range tasks = s_.jobs.tasks[index];
    const int segment = job.segment(tasks);
    dense_tasks(job, tasks, i0, [&](int group, const Accumulators& acc) {
      if (row_parallel) {
        push_partials(w_.partial[which == Gemm::kPostExpert], group, i0, acc);
      } else if (which == Gemm::kQkvu) {
        store_slots(group, segment, i0, acc);
      } else {
        store_sums(mine<float>(w_.segment_sums), kMaxRows, job.groups * 16, group, segment, i0, 0, acc);
        run_phase<&DenseSteps::push_pooled>(group, i0);
      }
    });
  }

 private:
  // The operand of the pass that starts at row i0.
  __device__ bool load(int i0) {
    if (s_.gemm == Gemm::kQkvu || s_.gemm == Gemm::kPreExpert) return run_phase<&DenseSteps::load_normed>(i0);
    if (s_.gemm == Gemm::kPostExpert) {
      if (i0 > 0) {  // of the first pass it is done
        run_phase<&DenseSteps::prepare_terms>(i0);
        sync_block();
      }
      run_phase<&DenseSteps::push_sums_of_squares>(i0);
      if (!run_phase<&DenseSteps::combine>(i0)) return false;
    }
    return run_phase<&DenseSteps::load_slots>(i0);
  }

  __device__ void multiply(int i0) {
    const auto index = static_cast<uint32_t>(s_.gemm);
    dense_pass(s_.jobs.dense[index], s_.jobs.tasks[index], [&] { run_phase<&DenseSteps::warp_tasks>(i0); });
  }

  // Of q, k, v and u each warp that finishes a head waits for the sums that it needs, instead of all blocks for all.
  __device__ void store_slots(int group, int segment, int i0, const Accumulators& acc) const {
    const int g = thread_index() % 32 / 4, t = thread_index() % 4, columns = static_cast<int>(p_.qkvu_rows());
    uint64_t* slot = mine<uint64_t>(w_.head_sums) + (segment * kMaxRows + i0 + 2 * t) * columns + group * 16 + g;
    for_results(i0, acc, [&](int row, int column, float sum) {
      store_slot(slot + row * columns + column, bit_cast<uint32_t>(sum), place_.epoch);
    });
  }

  __device__ void push_partials(int64_t address, int group, int i0, const Accumulators& acc) const {
    const int g = thread_index() % 32 / 4, t = thread_index() % 4;
    const int owned = hidden() / kRanks, owner = group * 16 / owned, column = group * 16 - owner * owned + g;
    uint64_t* slot = slots_to(owner, address, kMaxRows * owned) + (i0 + 2 * t) * owned + column;
    for_results(i0, acc, [&](int row, int beside, float sum) {
      store_slot(slot + row * owned + beside, bit_cast<uint32_t>(sum), place_.epoch);
    });
  }

  // Pooled rows go to every rank. Segment sums would be too many, so the last of a row group's eight tasks adds them.
  __device__ void push_pooled(int group, int i0) {
    const float* sums = mine<float>(w_.segment_sums);
    const int lane = thread_index() % 32, columns = static_cast<int>(p_.moe_columns());
    uint32_t* counter = mine<uint32_t>(w_.group_counts) + i0 / kPassRows * (columns / 16) + group;
    uint32_t before = 0;
    __syncwarp();
    if (lane == 0) before = count_arrival(counter);
    if (__shfl_sync(~0u, before, 0) != kSegments - 1) return;
    __syncwarp();                 // for the memory that the first lane saw
    if (lane == 0) *counter = 0;  // for the next layer, which lies behind barriers
#pragma unroll 1
    for (int at = lane; at < min(kPassRows, rows() - i0) * 8; at += 32) {
      const int i = i0 + at / 8, column = group * 16 + at % 8 * 2;
      push_all(w_.pooled, kMaxRows * (columns / 2), (i * columns + column) / 2,
               add_segments(sums, kMaxRows, columns, i, column));
    }
  }

  // Segment sums of this block's experts of this rank for one pass of rows, in the segment that the operand is of: half
  // a warp per row. They travel as they are, which spares the rank a meeting of its blocks.
  __device__ void router_dots(int i0) {
    const int warp = thread_index() / 32, lane = thread_index() % 32, j = lane % 16;
    const int own = static_cast<int>(p_.experts_rank()), count = min(kPassRows, rows() - i0), pairs = (count + 1) / 2;
    const Range range = segment_part(own, kSegments, place_.index, place_.size);
    const int segment = range.begin / own;
    const int length = hidden() / kSegments, blocks_of_16 = length / 16;
    const float* weights_of_layer = weights().router + p_.router(layer()) + j;
#pragma unroll 1
    for (int unit = warp; unit < (range.end - range.begin) * pairs; unit += kWarps) {
      const int e = range.begin + unit / pairs - segment * own;
      const int i = min(unit % pairs * 2 + lane / 16, count - 1);
      const float* row = weights_of_layer + e * hidden() + segment * length;
      const uint16_t* h = region<uint16_t>() + column_tile_at(i, j, 0);
      float sum = 0.0f;
      constexpr int kAtOnce = 16;  // loads in flight: they come from L2, and there is nothing else to do
      int b = 0;
#pragma unroll 1
      for (; b + kAtOnce <= blocks_of_16; b += kAtOnce) {
        float w[kAtOnce];
#pragma unroll
        for (int e = 0; e < kAtOnce; ++e) w[e] = __ldg(row + (b + e) * 16);
#pragma unroll
        for (int e = 0; e < kAtOnce; ++e) sum = fma1(from_bf16(h[(b + e) * kTile]), w[e], sum);
      }
#pragma unroll 1
      for (; b < blocks_of_16; ++b) sum = fma1(from_bf16(h[b * kTile]), __ldg(row + b * 16), sum);
      sum = fold_warp(sum);
      // The eight lanes of each half store for eight ranks.
      if (j < kRanks)
        store_slot(slots_to(j, w_.logits, kMaxRows * own * kSegments) + ((i0 + i) * own + e) * kSegments + segment,
                   bit_cast<uint32_t>(sum), place_.epoch);
    }
  }
};

}  // namespace muse
