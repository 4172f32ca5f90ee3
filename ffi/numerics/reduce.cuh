// The ordered reductions of reduce.h spread over threads: one accumulator per thread, sixteen threads (half a warp) per
// segment (docs/numerics.md 2).
#pragma once

#include "reduce.h"

namespace muse {

constexpr unsigned kFullWarp = 0xFFFFFFFFu;

// The fold of a half warp's sixteen accumulators, in each of the sixteen threads: neighbours first, and as addition
// commutes all threads get the same bits. All 32 threads of the warp take part.
__device__ __forceinline__ float fold_half_warp(float lane) {
#pragma unroll
  for (int width = 1; width < kLanes; width *= 2) lane = lane + __shfl_xor_sync(kFullWarp, lane, width);
  return lane;
}

// lanes(x, y) over n elements by the sixteen threads of a half warp; each half may bring its own x and y, n is the
// same.
template <typename X, typename Y>
__device__ __forceinline__ float lanes_half_warp(int64_t n, const X* x, const Y* y) {
  float lane = 0.0f;
#pragma unroll 4
  for (int64_t i = threadIdx.x % kLanes; i < n; i += kLanes) lane = fma1(widen(x[i]), widen(y[i]), lane);
  return fold_half_warp(lane);
}

// Where a row of eight segments is reduced by as many half warps, thread 16 s + j holds accumulator j of segment s.
constexpr int kRowThreads = kSegments * kLanes;

// tree8 over the half warps of kRowThreads threads, given each one's segment sum; the same in all threads. `shared`
// holds four numbers and may be used again at once. All threads of the block take part, and they are exactly
// kRowThreads.
__device__ __forceinline__ float tree8_block(float segment_sum, float* shared) {
  const float pair = segment_sum + __shfl_xor_sync(kFullWarp, segment_sum, kLanes);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = pair;
  __syncthreads();
  return (shared[0] + shared[1]) + (shared[2] + shared[3]);
}

}  // namespace muse
