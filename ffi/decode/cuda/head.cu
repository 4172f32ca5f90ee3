// Final norm, vocabulary projection and argmax over all ranks, in one launch.
#include <algorithm>

#include "ffi/decode/cuda/dense.cuh"
#include "ffi/decode/cuda/launch.h"
#include "ffi/decode/cuda/place.cuh"
#include "ffi/decode/cuda/producer.cuh"
#include "ffi/ops/head/row.h"

namespace muse {
namespace {

__device__ DenseJob head_job(const StepArgs& a, int rank) {
  return column_parallel_job(a.head.lm_head[rank], a.plan.head_groups() * 16, a.plan.hidden);
}

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

class Head : DenseSteps {
 public:
  using DenseSteps::DenseSteps;

  __device__ bool run() {
    static_assert(kHeadRows == kPassRows, "the scratch holds the sums of one pass");
    next_epoch();
    norm_rows();
    const int64_t groups = p_.head_groups();
    float* sums = mine<float>(w_.segment_sums);
    for (int i0 = 0; i0 < rows(); i0 += kPassRows) {
      if (!rank_barrier(Phase::kHead)) return false;  // h is written, the last pass's sums are read
      dense_pass(
          head_job(a_, me()), mine<uint16_t>(w_.h), p_.hidden, i0,
          [&](int group, int segment, int, const Accumulators& acc) {
            store_sums(sums, kHeadRows, groups * 16, group, segment, i0, acc, i0);
          },
          [](int, Range) {});
      if (!rank_barrier(Phase::kHead)) return false;
      finish_logits(sums, i0);
    }
    if (!rank_barrier(Phase::kHead) || !choose()) return false;
    return rank_barrier(Phase::kHead);
  }

 private:
  __device__ void norm_rows() {
    float* x = region<float>();
    uint16_t* h = mine<uint16_t>(w_.h);
    for (int i = place_.index; i < rows(); i += place_.size) {
      const float* stream = a_.shared.stream + s_.rows.row[i] * p_.hidden;
      sync_block();
      for (int64_t c = thread_index(); c < p_.hidden; c += kThreads) x[c] = round_bf16(stream[c]);
      sync_block();
      const float r = inverse_rms(block_sumsq(p_.hidden, x, s_.partial), p_.hidden, p_.eps);
      for (int64_t c = thread_index(); c < p_.hidden; c += kThreads)
        h[column_tile_at(i, c, p_.hidden)] = to_bf16((x[c] * r) * from_bf16(a_.head.gain[c]));
    }
  }

  __device__ void finish_logits(const float* sums, int i0) {
    const int64_t columns = p_.vocab_rank();
    const int count = min(kPassRows, rows() - i0);
    for (int i = 0; i < count; ++i)
      for (int64_t c = place_.index * kThreads + thread_index(); c < columns; c += int64_t{place_.size} * kThreads)
        a_.head.logits[me()][s_.rows.row[i0 + i] * columns + c] = softcap_logit(
            sum_of(sums, kHeadRows, p_.head_groups() * 16, i, c), a_.head.multiplier, a_.head.cap);
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
    const int64_t per_source = kMaxRows * kBestWords, parity = place_.epoch % 2 * kRanks * per_source * 8;
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
              Phase::kHead,
              [&](int e) { return slots_from(lane, w_.best + parity, per_source) + i * kBestWords + e; },
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

__global__ void __launch_bounds__(kLaunchThreads, 1) decode_head(const __grid_constant__ StepArgs args) {
  extern __shared__ __align__(128) unsigned char memory[];
  BlockShared& shared = *reinterpret_cast<BlockShared*>(memory);
  start_block(args, shared);
  if (threadIdx.x == 0) {
    shared.rows.count = 0;
    for (int t = 0; t < args.plan.rows; ++t)
      if (args.shared.sequence[t] >= 0) shared.rows.row[shared.rows.count++] = static_cast<int16_t>(t);
  }
  __syncthreads();
  const Place& place = shared.place;
  if (shared.rows.count > 0) {
    if (threadIdx.x < kThreads) {
      Head head(shared);
      if (head.run() && place.index == 0 && threadIdx.x == 0) place.control->epoch = place.epoch;
    } else if (threadIdx.x == kThreads) {
      Producer producer(shared.ring, place.index, place.size);
      producer.dense(head_job(shared.args, place.rank), (shared.rows.count + kPassRows - 1) / kPassRows);
      producer.finish();
    }
  }
  __syncthreads();  // the producer's copies have landed
}

}  // namespace

Status prepare_head(const Plan& plan, Prepared* prepared) {
  return prepare_kernel("decode_head", decode_head, sizeof(BlockShared),
                        std::max<int64_t>(dense_operand_bytes(plan.hidden), plan.hidden * 4), prepared);
}

Status launch_head(Stream stream, const StepArgs& args, int blocks) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const Plan& p = args.plan;
  cudaError_t e = clear_barriers(args, cuda_stream);
  const auto fill = [&](void* data, int value, int64_t bytes) {
    if (e == cudaSuccess) e = cudaMemsetAsync(data, value, bytes, cuda_stream);
  };
  fill(args.head.token, 0xFF, p.rows * static_cast<int64_t>(sizeof(int32_t)));  // -1: inactive
  fill(args.head.nan, 0, p.rows);
  for (int i = 0; i < args.local_count; ++i)
    fill(args.head.logits[args.local[i]], 0, p.rows * p.vocab_rank() * static_cast<int64_t>(sizeof(float)));
  if (e == cudaSuccess) {
    decode_head<<<blocks / args.local_count * args.local_count, kLaunchThreads,
                  sizeof(BlockShared) + args.region_bytes, cuda_stream>>>(args);
    e = cudaGetLastError();
  }
  return e == cudaSuccess ? Status{} : Status{std::string("decode_head: ") + cudaGetErrorString(e)};
}

}  // namespace muse
