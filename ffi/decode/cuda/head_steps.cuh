// The head's phases: final norm, vocabulary projection and argmax over all ranks.
#pragma once

#include "ffi/decode/cuda/dense.cuh"
#include "ffi/ops/head/row.h"

namespace muse {

// Is (a, a_id) the better argmax candidate? NaN below all numbers, ties to the lower id; id -1: none.
__device__ __forceinline__ bool better(float a, int32_t a_id, float b, int32_t b_id) {
  if (a_id < 0 || b_id < 0) return b_id < 0 && a_id >= 0;
  if (is_nan(a) || is_nan(b)) return is_nan(a) == is_nan(b) ? a_id < b_id : is_nan(b);
  return a != b ? a > b : a_id < b_id;
}

__device__ __forceinline__ void reduce_warp(float& best, int32_t& id) {
  for (int step = 16; step; step /= 2) {
    const float other = __shfl_xor_sync(~0u, best, step);
    const int32_t other_id = __shfl_xor_sync(~0u, id, step);
    if (better(other, other_id, best, id)) best = other, id = other_id;
  }
}

class HeadSteps : public DenseBase {
 public:
  using DenseBase::DenseBase;

  // False: somebody gave up, or there are no rows.
  __device__ bool run() {
    static_assert(kHeadRows == kPassRows, "the scratch holds the sums of one pass");
    run_phase<&HeadSteps::clear_inactive>();
    if (rows() == 0) return false;
    next_epoch();
    run_phase<&HeadSteps::norm_rows>();
    for (int i0 = 0; i0 < rows(); i0 += kPassRows) {
      if (!rank_barrier(Phase::kHead)) return false;  // h is written, the last pass's sums are read
      run_phase<&HeadSteps::pass>(i0);
      if (!rank_barrier(Phase::kHead)) return false;
      run_phase<&HeadSteps::finish_logits>(i0);
    }
    if (!rank_barrier(Phase::kHead) || !run_phase<&HeadSteps::choose>()) return false;
    return rank_barrier(Phase::kHead);
  }

  // A warp's tasks of the pass that starts at row i0.
  __device__ void multiply(int i0) {
    const DenseJob& job = s_.jobs.dense[kHeadJob];
    const Range tasks = s_.jobs.tasks[kHeadJob];
    const int segment = job.segment(tasks), columns = job.groups * 16;
    dense_tasks(job, tasks, i0, [&](int group, const Accumulators& acc) {
      store_sums(mine<float>(w_.segment_sums), kHeadRows, columns, group, segment, i0, i0, acc);
    });
  }

 private:
  __device__ void pass(int i0) {
    const DenseJob& job = s_.jobs.dense[kHeadJob];
    const Range tasks = s_.jobs.tasks[kHeadJob];
    load_operand(mine<uint16_t>(w_.h), hidden(), i0, job.segment(tasks) * job.blocks, job.blocks);
    dense_pass(job, tasks, [&] { run_phase<&HeadSteps::multiply>(i0); });
  }

  // The results start as ones; those of inactive rows are zeros, their token stays -1.
  __device__ void clear_inactive() {
    const int64_t columns = p_.vocab_rank();
#pragma unroll 1
    for (int t = block(); t < p_.rows; t += blocks()) {
      if (a_.shared.sequence[t] >= 0) continue;
#pragma unroll 1
      for (int64_t c = thread_index(); c < columns; c += kThreads) a_.head.logits[me()][t * columns + c] = 0.0f;
      if (thread_index() == 0 && me() == a_.local[0]) a_.head.nan[t] = false;
    }
  }

  __device__ void norm_rows() {
    float* x = region<float>();
    uint16_t* h = mine<uint16_t>(w_.h);
    for (int i = place_.index; i < rows(); i += place_.size) {
      // Behind layers the rank's own, which other blocks wrote; alone the call's operand.
      const float* from = p_.layer_end > p_.layer_begin ? stream(i) : a_.shared.stream + s_.rows.row[i] * p_.hidden;
      sync_block();
      for (int64_t c = thread_index(); c < p_.hidden; c += kThreads) x[c] = round_bf16(__ldcg(from + c));
      sync_block();
      const float r = inverse_rms(block_sumsq(p_.hidden, x, s_.partial), p_.hidden, p_.eps);
      for (int64_t c = thread_index(); c < p_.hidden; c += kThreads)
        h[column_tile_at(i, static_cast<int>(c), hidden())] = to_bf16((x[c] * r) * from_bf16(a_.head.gain[c]));
    }
  }

  __device__ void finish_logits(int i0) {
    const float* sums = mine<float>(w_.segment_sums);
    const int columns = static_cast<int>(p_.vocab_rank()), padded = static_cast<int>(p_.head_groups()) * 16;
    float* logits = a_.head.logits[me()];
#pragma unroll 1
    for (int i = i0; i < min(i0 + kPassRows, rows()); ++i)
#pragma unroll 1
      for (int c = block() * kThreads + thread_index(); c < columns; c += blocks() * kThreads) {
        float s[kSegments];
#pragma unroll
        for (int r = 0; r < kSegments; ++r) s[r] = __ldcg(sums + (r * kHeadRows + i - i0) * padded + c);
        logits[s_.rows.row[i] * columns + c] = softcap_logit(tree8(s), a_.head.multiplier, a_.head.cap);
      }
  }

  struct ChooseRegion {
    float best[kWarps];
    int32_t id[kWarps];
    int32_t nan;
  };

  // A rank's best of each row to every rank, and the best of those.
  __device__ bool choose() {
    ChooseRegion& sh = *region<ChooseRegion>();
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    const int64_t columns = p_.vocab_rank();
    const int per_source = kMaxRows * kBestWords, parity = static_cast<int>(place_.epoch % 2) * kRanks * per_source * 8;
    for (int i = place_.index; i < rows(); i += place_.size) {
      const float* row = a_.head.logits[me()] + s_.rows.row[i] * columns;
      float best = 0.0f;
      int32_t id = -1;
      bool nan = false;
      sync_block();
      if (thread_index() == 0) sh.nan = 0;
      sync_block();
#pragma unroll 4
      for (int64_t c = thread_index(); c < columns; c += kThreads) {
        const float logit = __ldcg(row + c);
        nan = nan || is_nan(logit);
        if (better(logit, static_cast<int32_t>(c), best, id)) best = logit, id = static_cast<int32_t>(c);
      }
      reduce_warp(best, id);
      if (lane == 0) sh.best[warp] = best, sh.id[warp] = id;
      if (nan) sh.nan = 1;
      sync_block();
      if (warp == 0) {
        best = lane < kWarps ? sh.best[lane] : 0.0f;
        id = lane < kWarps ? sh.id[lane] : -1;
        reduce_warp(best, id);
        if (lane < kRanks) {
          uint64_t* slot = slots_to(lane, w_.best + parity, per_source) + i * kBestWords;
          store_slot(slot, bit_cast<uint32_t>(best), place_.epoch);
          // The top bit of the id word tells that some logit was NaN.
          store_slot(slot + 1, static_cast<uint32_t>(id + me() * columns) | (sh.nan ? 0x80000000u : 0u), place_.epoch);
        }
        uint32_t word[2] = {};
        if (lane < kRanks)
          wait(
              Phase::kHead, [&](int e) { return slots_from(lane, w_.best + parity, per_source) + i * kBestWords + e; },
              [&](int) { return lane; }, word);
        __syncwarp();
        best = bit_cast<float>(word[0]);
        id = lane < kRanks ? static_cast<int32_t>(word[1] & 0x7FFFFFFFu) : -1;
        const bool any_nan = __any_sync(~0u, word[1] >> 31);
        reduce_warp(best, id);
        if (lane == 0 && !place_.gave_up && me() == a_.local[0]) {
          a_.head.token[s_.rows.row[i]] = is_nan(best) ? 0 : id;  // a row of NaN gives 0
          a_.head.nan[s_.rows.row[i]] = any_nan;
        }
      }
      if (!all_alive()) return false;
    }
    return true;
  }
};

// The head's GEMM and the block's part of it; by one thread, behind start_block.
__device__ __forceinline__ void plan_head(const StepArgs& args, BlockShared& shared) {
  DenseJob& job = shared.jobs.dense[kHeadJob];
  job = column_parallel_job(args.head.lm_head[shared.place.rank], args.plan.head_groups() * 16, args.plan.hidden);
  shared.jobs.tasks[kHeadJob] = job.tasks(shared.place.index, shared.place.size);
}

}  // namespace muse
