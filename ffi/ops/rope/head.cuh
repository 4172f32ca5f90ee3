// Heads of 64 elements over half a warp: thread j of sixteen holds elements j, j + 16, j + 32, j + 48, which are its
// accumulator's terms in order.
#pragma once

#include "ffi/numerics/reduce.cuh"
#include "ffi/ops/rope/row.h"

namespace muse {

constexpr int kHeadTerms = kHead / kLanes;

// sumsq64 of the head whose elements the half warp holds. All 32 threads of the warp take part.
__device__ __forceinline__ float head_sumsq(const float (&x)[kHeadTerms]) {
  float lane = 0.0f;
#pragma unroll
  for (int i = 0; i < kHeadTerms; ++i) lane = fma1(x[i], x[i], lane);
  return fold_half_warp(lane);
}

}  // namespace muse
