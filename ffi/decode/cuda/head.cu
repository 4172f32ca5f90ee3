// Final norm, vocabulary projection and argmax over all ranks, in one launch.
#include <cuda_runtime.h>

#include "ffi/decode/cuda/column_parallel.cuh"
#include "ffi/decode/cuda/head.h"
#include "ffi/ops/head/row.h"

namespace muse {
namespace {

struct Shared {
  SegmentSums sums;
  float partial[kSegments];
  float best[kWarps];
  int32_t best_id[kWarps];
  int16_t rows[kMaxRows];
  int32_t count;
  float row[];  // hidden
};

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

__device__ bool run(const HeadArgs& a, Shared& s, Place& place) {
  const int me = place.rank, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    s.count = 0;
    for (int t = 0; t < a.rows; ++t)
      if (a.sequence[t] >= 0) s.rows[s.count++] = static_cast<int16_t>(t);
  }
  __syncthreads();
  const int n = s.count;
  if (n == 0) return true;
  ++place.epoch;

  uint16_t* h = reinterpret_cast<uint16_t*>(a.workspace[me] + a.h);
  for (int i = place.index; i < n; i += place.size) {
    const float* stream = a.stream + s.rows[i] * a.hidden;
    __syncthreads();
    for (int64_t c = threadIdx.x; c < a.hidden; c += kThreads) s.row[c] = round_bf16(stream[c]);
    __syncthreads();
    const float r = inverse_rms(block_sumsq(a.hidden, s.row, s.partial), a.hidden, a.eps);
    for (int64_t c = threadIdx.x; c < a.hidden; c += kThreads)
      h[i * a.hidden + permuted(c)] = to_bf16((s.row[c] * r) * from_bf16(a.gain[c]));
  }
  if (!rank_barrier(place, Phase::kHead)) return false;

  const int64_t columns = a.vocab / kRanks, groups = (columns + 15) / 16;
  float* logits = a.logits[me];
  column_parallel(place, n, s.sums, a.lm_head[me], groups, h, a.hidden, [&](int64_t group, int i, int c, float sum) {
    const int64_t column = group * 16 + c;
    if (column < columns) logits[s.rows[i] * columns + column] = softcap_logit(sum, a.multiplier, a.cap);
  });
  if (!rank_barrier(place, Phase::kHead)) return false;

  const auto slot = [&](int rank, int source, int i) {
    return reinterpret_cast<uint64_t*>(a.workspace[rank] + a.best) +
           ((place.epoch % 2 * kRanks + source) * kMaxRows + i) * kBestWords;
  };
  bool alive = true;
  for (int i = place.index; i < n; i += place.size) {
    const float* row = logits + s.rows[i] * columns;
    float best = 0.0f;
    int32_t id = -1;
    bool nan = false;
    for (int64_t c = threadIdx.x; c < columns; c += kThreads) {
      nan = nan || is_nan(row[c]);
      if (better(row[c], static_cast<int32_t>(c), best, id)) best = row[c], id = static_cast<int32_t>(c);
    }
    reduce_warp(best, id);
    if (lane == 0) s.best[warp] = best, s.best_id[warp] = id;
    nan = __syncthreads_or(nan);
    if (warp == 0) {
      best = lane < kWarps ? s.best[lane] : 0.0f;
      id = lane < kWarps ? s.best_id[lane] : -1;
      reduce_warp(best, id);
      if (lane < kRanks) {
        // The top bit of the id word tells that some logit was NaN.
        store_slot(slot(lane, me, i), bit_cast<uint32_t>(best), place.epoch);
        store_slot(slot(lane, me, i) + 1, static_cast<uint32_t>(id + me * columns) | (nan ? 0x80000000u : 0u),
                   place.epoch);
      }
      uint32_t word = 0;
      if (lane < kRanks) {
        best = bit_cast<float>(wait_slot(place, slot(me, lane, i), place.epoch, Phase::kHead, lane, alive));
        word = wait_slot(place, slot(me, lane, i) + 1, place.epoch, Phase::kHead, lane, alive);
      }
      id = lane < kRanks ? static_cast<int32_t>(word & 0x7FFFFFFFu) : -1;
      const bool any_nan = __any_sync(~0u, word >> 31);
      reduce_warp(best, id);
      if (lane == 0 && alive && me == a.local[0]) {
        a.token[s.rows[i]] = is_nan(best) ? 0 : id;  // a row of NaN gives 0
        a.nan[s.rows[i]] = any_nan;
      }
    }
    alive = __syncthreads_and(alive);
    if (!alive) return false;
  }
  return rank_barrier(place, Phase::kHead);
}

__global__ void __launch_bounds__(kThreads, 1) decode_head(const __grid_constant__ HeadArgs args) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const uint32_t size = gridDim.x / args.local_count;
  const int rank = args.local[blockIdx.x / size];
  Control* control = reinterpret_cast<Control*>(args.workspace[rank]);
  Place place{control,
              args.report[rank],
              now() + args.wait_limit_ns,
              static_cast<uint32_t>(rank),
              blockIdx.x % size,
              size,
              0,
              0,
              0};
  place.epoch = load_relaxed(&control->epoch);
  if (run(args, shared, place) && place.index == 0 && threadIdx.x == 0) control->epoch = place.epoch;
}

int shared_bytes(int64_t hidden) { return static_cast<int>(sizeof(Shared) + hidden * 4); }

}  // namespace

Status prepare_head(int64_t hidden, int* blocks) {
  int device = 0, multiprocessors = 0, per_multiprocessor = 0;
  cudaError_t e = cudaFuncSetAttribute(decode_head, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes(hidden));
  if (e == cudaSuccess) e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (e == cudaSuccess)
    e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, decode_head, kThreads, shared_bytes(hidden));
  if (e != cudaSuccess) return {std::string("decode_head: ") + cudaGetErrorString(e)};
  *blocks = multiprocessors * (per_multiprocessor ? 1 : 0);
  return *blocks > 0 ? Status{} : Status{"decode_head: a block does not fit on a multiprocessor"};
}

Status launch_head(Stream stream, const HeadArgs& args, int blocks) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  cudaError_t e = cudaMemsetAsync(args.token, 0xFF, args.rows * sizeof(int32_t), cuda_stream);  // -1: inactive
  if (e == cudaSuccess) e = cudaMemsetAsync(args.nan, 0, args.rows, cuda_stream);
  for (int i = 0; i < args.local_count && e == cudaSuccess; ++i) {
    e = cudaMemsetAsync(args.logits[args.local[i]], 0, args.rows * (args.vocab / kRanks) * sizeof(float), cuda_stream);
    if (e == cudaSuccess)
      e = cudaMemsetAsync(args.workspace[args.local[i]] + offsetof(Control, barrier), 0, sizeof(Control::barrier),
                          cuda_stream);
  }
  if (e == cudaSuccess) {
    decode_head<<<blocks / args.local_count * args.local_count, kThreads, shared_bytes(args.hidden), cuda_stream>>>(
        args);
    e = cudaGetLastError();
  }
  return e == cudaSuccess ? Status{} : Status{std::string("decode_head: ") + cudaGetErrorString(e)};
}

}  // namespace muse
