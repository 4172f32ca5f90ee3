// The bf16 GEMMs of a layer, one piece of code: q, k and v; u; o_proj; pre_expert_proj with the router, which has
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
      if (s_.gemm != Gemm::kGates) mark(Mark::kLoad);
      multiply(i0);
    }
    if (thread_index() == 0)
      s_.gemm = s_.gemm == Gemm::kPostExpert ? Gemm::kQkv : Gemm{static_cast<uint32_t>(s_.gemm) + 1};
    sync_block();
    return true;
  }

  // Pooled rows go to every rank, two columns a thread, as soon as their segments' sums are there: these would be too
  // many.
  __device__ void push_pooled() {
    const int columns = static_cast<int>(p_.moe_columns()), words = columns / 2;
    const int warp = thread_index() / 32, lane = thread_index() % 32;
#pragma unroll 1
    for (int at = (warp * blocks() + first_unit(3)) * 32 + lane; at < rows() * words; at += blocks() * kThreads) {
      const uint32_t two = wait_segments(place_, Phase::kRouter, mine<uint64_t>(w_.pool_sums) + 2 * at,
                                         kMaxRows * columns, place_.epoch);
      if (place_.gave_up) return;  // the router's waits say so
      push_all(w_.pooled, kMaxRows * words, at, two);
    }
  }

 protected:
  // A warp's tasks. Column-parallel results stay in the rank as segment sums: whoever finishes columns waits for those
  // that it needs, instead of all blocks for all. Of a row-parallel GEMM this rank's columns are one segment: its
  // partial sums go to the owners of the output columns.
  __device__ void warp_tasks(int i0) {
    const Gemm which = s_.gemm;
    const bool row_parallel = which == Gemm::kOutput || which == Gemm::kPostExpert;
    const auto index = static_cast<uint32_t>(which);
    const DenseJob& job = s_.jobs.dense[index];
    const Range tasks = s_.jobs.tasks[index];
    const int segment = job.segment(tasks);
    dense_tasks(job, tasks, i0, [&](int group, const Accumulators& acc) {
      const int g = thread_index() % 32 / 4, row = i0 + thread_index() % 4 * 2;
      uint64_t* slot;  // of the lane's first sum
      int columns;
      if (row_parallel) {
        columns = hidden() / kRanks;
        const int owner = job.by_groups.quotient(group * kRanks);
        slot = slots_to(owner, w_.partial[which == Gemm::kPostExpert], kMaxRows * columns) - owner * columns;
      } else {
        columns = job.of_layer * 16;
        slot = mine<uint64_t>(which <= Gemm::kGates ? w_.head_sums : w_.pool_sums) + segment * kMaxRows * columns;
      }
      store_results(slot + row * columns + (job.first + group) * 16 + g, columns, i0, acc);
    });
  }

 private:
  // The operand of the pass that starts at row i0.
  __device__ bool load(int i0) {
    if (s_.gemm == Gemm::kPreExpert && i0 == 0) fetch_router();
    if (s_.gemm == Gemm::kGates && rows() <= kPassRows) return true;  // the one before had the same
    if (s_.gemm <= Gemm::kGates || s_.gemm == Gemm::kPreExpert) return run_phase<&DenseSteps::load_normed>(i0);
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
    dense_pass(s_.jobs.dense[index], s_.jobs.tasks[index], [&] {
      run_phase<&DenseSteps::warp_tasks>(i0);
      if (s_.gemm == Gemm::kPreExpert) run_phase<&DenseSteps::router_dots>(i0);
    });
  }

  // The block's experts of the router, in the segment that pre_expert_proj's operand is of.
  struct RouterShare {
    int segment;
    Range rows;
    const float* row;  // the first
  };
  __device__ RouterShare router_share() const {
    const auto index = static_cast<uint32_t>(Gemm::kPreExpert);
    const uint32_t each = place_.size / kSegments;
    const int own = static_cast<int>(p_.experts_rank()), segment = s_.jobs.dense[index].segment(s_.jobs.tasks[index]);
    Range rows{};
    if (place_.index < each * kSegments) {  // segment_part's, by one division
      const Divisor by_blocks = divisor(each);
      const int at = own * (block() - segment * static_cast<int>(each));
      rows = {by_blocks.quotient(at), by_blocks.quotient(at + own)};
    }
    return {segment, rows,
            global(weights().router) + (layer() * own + rows.begin) * hidden() + segment * (hidden() / kSegments)};
  }
  // Of so many of them the weights lie behind the operand; they come while it is awaited.
  __device__ static int held_rows(Range rows) { return min(rows.end - rows.begin, kHeldRouterRows); }
  __device__ float* held_router() const { return region<float>(static_cast<int>(dense_operand_bytes(p_.hidden))); }
  __device__ void fetch_router() {
    const RouterShare share = router_share();
    const int quads = hidden() / kSegments / 4, held = held_rows(share.rows);
#pragma unroll 1
    for (int row = 0; row < held; ++row)
#pragma unroll 1
      for (int q = thread_index(); q < quads; q += kThreads)
        ptx::copy16(ptx::shared_address(held_router() + (row * quads + q) * 4), share.row + row * hidden() + 4 * q);
  }

  // Segment sums of this block's experts of this rank for one pass of rows: half a warp per row, by the warps that have
  // no task of the GEMM, where there are some. They travel as they are, which spares the rank a meeting of its blocks.
  __device__ void router_dots(int i0) {
    const Range tasks = s_.jobs.tasks[static_cast<uint32_t>(Gemm::kPreExpert)];
    const int busy = tasks.end - tasks.begin < kWarps ? tasks.end - tasks.begin : 0, warp = thread_index() / 32 - busy,
              warps = kWarps - busy;
    if (warp < 0) return;
    const int lane = thread_index() % 32, j = lane % 16;
    const int own = static_cast<int>(p_.experts_rank()), count = min(kPassRows, rows() - i0), pairs = (count + 1) / 2;
    const RouterShare share = router_share();
    const int held = held_rows(share.rows);
    const int length = hidden() / kSegments, blocks_of_16 = length / 16;
#pragma unroll 1
    for (int unit = warp; unit < (share.rows.end - share.rows.begin) * pairs; unit += warps) {
      const int of_block = static_cast<uint32_t>(unit) / pairs, e = share.rows.begin + of_block;
      const int i = min((unit - of_block * pairs) * 2 + lane / 16, count - 1);
      const float* row = (of_block < held ? held_router() + of_block * length : share.row + of_block * hidden()) + j;
      const uint16_t* h = region<uint16_t>() + column_tile_at(i, j, 0);
      float sum = 0.0f;
      constexpr int kAtOnce = 16;  // loads in flight
      int b = 0;
#pragma unroll 1
      for (; b + kAtOnce <= blocks_of_16; b += kAtOnce) {
        float w[kAtOnce];
#pragma unroll
        for (int e = 0; e < kAtOnce; ++e) w[e] = row[(b + e) * 16];
#pragma unroll
        for (int e = 0; e < kAtOnce; ++e) sum = fma1(from_bf16(h[(b + e) * kTile]), w[e], sum);
      }
#pragma unroll 1
      for (; b < blocks_of_16; ++b) sum = fma1(from_bf16(h[b * kTile]), row[b * 16], sum);
      sum = fold_warp(sum);
      // The eight lanes of each half store for eight ranks.
      if (j < kRanks)
        store_slot(
            slots_to(j, w_.logits, kMaxRows * own * kSegments) + ((i0 + i) * own + e) * kSegments + share.segment,
            bit_cast<uint32_t>(sum), place_.epoch);
    }
  }
};

}  // namespace muse
