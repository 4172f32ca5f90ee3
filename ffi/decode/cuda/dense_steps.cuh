// The four bf16 GEMMs of a layer, one piece of code: q, k, v and u; o_proj; pre_expert_proj with the router, which has
// the same operand; post_expert_proj.
#pragma once

#include "ffi/decode/cuda/operands.cuh"

namespace muse {

enum class Gemm { kQkvu, kOutput, kPreExpert, kPostExpert };

class DenseSteps : public OperandSteps {
 public:
  using OperandSteps::OperandSteps;

  // Column-parallel results stay in the rank as segment sums. Of a row-parallel GEMM this rank's columns are one
  // segment: its partial sums go to the owners of the output columns. False: somebody gave up.
  __device__ bool gemm(int64_t l, Gemm which) {
    const RankPointers& w = weights();
    const bool attention = which == Gemm::kQkvu || which == Gemm::kOutput;
    const bool row_parallel = which == Gemm::kOutput || which == Gemm::kPostExpert;
    const DenseJob job = which == Gemm::kQkvu        ? qkvu_job(p_, w, l)
                         : which == Gemm::kOutput    ? o_job(p_, w, l)
                         : which == Gemm::kPreExpert ? pre_expert_job(p_, w, l)
                                                     : post_expert_job(p_, w, l);
    float* sums = mine<float>(w_.segment_sums);
    bool alive = true;
#pragma unroll 1
    for (int i0 = 0; i0 < rows() && alive; i0 += kPassRows)
      alive = dense_pass(
          job, i0,
          [&](Range) {
            if (!row_parallel) return run_phase<&DenseSteps::load_normed>(l, attention, i0);
            if (!attention) return run_phase<&DenseSteps::load_combined>(l, i0);
            load_operand(mine<uint16_t>(w_.o), static_cast<int>(p_.q_columns()), i0, 0, job.blocks);
            return true;
          },
          [&](int group, int segment, const Accumulators& acc) {
            if (row_parallel) {
              push_partials(w_.partial[!attention], group, i0, acc);
            } else {
              store_sums(sums, kMaxRows, job.groups * 16, group, segment, i0, 0, acc);
              if (!attention) push_pooled(sums, group, i0);
            }
          },
          [&](Range segments) {
            if (which == Gemm::kPreExpert) router_dots(l, i0, segments);
          });
    return alive;
  }

 private:
  __device__ void push_partials(int64_t offset, int group, int i0, const Accumulators& acc) const {
    const int g = thread_index() % 32 / 4, t = thread_index() % 4;
    const int owned = hidden() / kRanks, owner = group * 16 / owned, column = group * 16 - owner * owned + g;
    uint64_t* slot = slots_to(owner, offset, kMaxRows * owned) + column;
    const uint32_t epoch = place_.epoch;
#pragma unroll
    for (int b = 0; b < 2; ++b)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = i0 + 8 * b + 2 * t + (j & 1);
        if (i < rows()) store_slot(slot + i * owned + 8 * (j >> 1), bit_cast<uint32_t>(acc[b][j]), epoch);
      }
  }

  // Pooled rows go to every rank. Segment sums would be too many, so the last of a row group's eight tasks adds them.
  __device__ void push_pooled(const float* sums, int group, int i0) {
    const int lane = thread_index() % 32, columns = static_cast<int>(p_.moe_columns());
    uint32_t* counter = mine<uint32_t>(w_.group_counts) + i0 / kPassRows * (columns / 16) + group;
    uint32_t arrived = 0;
    __threadfence();
    __syncwarp();
    if (lane == 0) arrived = atomicAdd(counter, 1u);
    if (__shfl_sync(~0u, arrived, 0) != kSegments - 1) return;
    if (lane == 0) *counter = 0;  // for the next layer, which lies behind barriers
    __threadfence();
#pragma unroll 1
    for (int at = lane; at < min(kPassRows, rows() - i0) * 8; at += 32) {
      const int i = i0 + at / 8, column = group * 16 + at % 8 * 2;
      push_all(w_.pooled, kMaxRows * (columns / 2), (i * columns + column) / 2,
               add_segments(sums, kMaxRows, columns, i, column));
    }
  }

  // Segment sums of this block's run of (segment, expert of this rank) for one pass of rows: half a warp per row. They
  // travel as they are, which spares the rank a meeting of its blocks.
  __device__ void router_dots(int64_t l, int i0, Range segments) {
    const int warp = thread_index() / 32, lane = thread_index() % 32, j = lane % 16;
    const int own = static_cast<int>(p_.experts_rank()), count = min(kPassRows, rows() - i0), pairs = (count + 1) / 2;
    const Range range = part(own * kSegments, place_.index, place_.size);
    const int length = hidden() / kSegments, blocks_of_16 = length / 16;
    const float* weights_of_layer = weights().router + p_.router(l) + j;
#pragma unroll 1
    for (int unit = warp; unit < (range.end - range.begin) * pairs; unit += kWarps) {
      const int task = range.begin + unit / pairs, segment = task / own, e = task - segment * own;
      const int i = min(unit % pairs * 2 + lane / 16, count - 1);
      const float* row = weights_of_layer + e * hidden() + segment * length;
      const uint16_t* h = region<uint16_t>() + column_tile_at(i, (segment - segments.begin) * length + j, 0);
      float sum = 0.0f;
      constexpr int kAtOnce = 32;  // loads in flight: they come from L2, and there is nothing else to do
#pragma unroll 1
      for (int b0 = 0; b0 < blocks_of_16; b0 += kAtOnce) {
        float w[kAtOnce];
#pragma unroll
        for (int b = 0; b < kAtOnce; ++b) w[b] = __ldg(row + min(b0 + b, blocks_of_16 - 1) * 16);
#pragma unroll
        for (int b = 0; b < kAtOnce; ++b)
          if (b0 + b < blocks_of_16) sum = fma1(from_bf16(h[(b0 + b) * kTile]), w[b], sum);
      }
      sum = fold_warp(sum);
      // The eight lanes of each half store for eight ranks.
      if (j < kRanks)
        store_slot(slots_to(j, w_.logits, kMaxRows * own * kSegments) + ((i0 + i) * own + e) * kSegments + segment,
                   bit_cast<uint32_t>(sum), place_.epoch);
    }
  }
};

}  // namespace muse
