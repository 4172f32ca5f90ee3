// Row reductions of the contract by one block: warp w takes segment w, sixteen lanes of it.
#pragma once

#include "ffi/decode/cuda/block.cuh"
#include "ffi/numerics/elementary.h"
#include "ffi/numerics/reduce.h"

namespace muse {

// fold_lanes across sixteen lanes of a warp: neighbours first; every lane of the half warp gets the sum.
__device__ __forceinline__ float fold_warp(float lane_sum) {
  for (int step = 1; step < kLanes; step *= 2) lane_sum = lane_sum + __shfl_xor_sync(~0u, lane_sum, step);
  return lane_sum;
}

// sumsq of a row of n floats in shared memory; `partial` holds eight floats. All threads get the result.
inline __device__ __noinline__ float block_sumsq(int64_t n, const float* x, float* partial) {
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  static_assert(kWarps == kSegments, "a warp per segment");
  const int length = static_cast<int>(n / kSegments);
  const float* segment = x + warp * length;
  float sum = 0.0f;
  if (lane < kLanes) {
#pragma unroll 32
    for (int i = lane; i < length; i += kLanes) sum = fma1(segment[i], segment[i], sum);
  }
  sum = fold_warp(sum);
  if (lane == 0) partial[warp] = sum;
  sync_block();
  const float total = tree8(partial);
  sync_block();  // `partial` may be written again
  return total;
}

// lanes(x, x) over one segment in shared memory, by the first warp. All threads get it, and have read x.
inline __device__ __noinline__ float segment_sumsq(int length, const float* x, float* partial) {
  const int lane = thread_index();
  if (lane < 32) {
    float sum = 0.0f;
    if (lane < kLanes) {
#pragma unroll 32
      for (int i = lane; i < length; i += kLanes) sum = fma1(x[i], x[i], sum);
    }
    sum = fold_warp(sum);
    if (lane == 0) *partial = sum;
  }
  sync_block();
  return *partial;
}

// inverse_rms and sigmoid, one piece of code for all phases: most run once per layer, out of a cold instruction cache.
inline __device__ __noinline__ float rms_factor(float ss, int n, float eps) { return inverse_rms(ss, n, eps); }
inline __device__ __noinline__ float sigmoid_of(float x) { return sigmoid(x); }

// sumsq64 of one head by one warp: lane j < 16 holds elements j, j + 16, j + 32, j + 48 in x[0..3].
__device__ __forceinline__ float warp_sumsq64(const float (&x)[4]) {
  float sum = 0.0f;
  for (int i = 0; i < 4; ++i) sum = fma1(x[i], x[i], sum);
  return fold_warp(sum);
}

}  // namespace muse
