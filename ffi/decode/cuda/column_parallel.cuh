// A rank's column-parallel GEMM: blocks take groups of 16 output columns, warps take segments of K.
#pragma once

#include "ffi/decode/cuda/dense.cuh"
#include "ffi/decode/cuda/norms.cuh"
#include "ffi/decode/cuda/sync.cuh"

namespace muse {

// The lane's token rows of the pass that starts at column c0, by row index, or by list[column] / divisor; columns from
// n on repeat the first.
__device__ __forceinline__ Columns columns(const uint16_t* operand, int64_t width, int c0, int n, const int32_t* list,
                                           int divisor) {
  const int g = threadIdx.x % 32 / 4;
  const uint16_t* row[2];
  for (int b = 0; b < 2; ++b) {
    const int c = c0 + 8 * b + g < n ? c0 + 8 * b + g : 0;
    row[b] = operand + (list ? list[c] / divisor : c) * width;
  }
  return columns_of(row[0], row[1]);
}

// `groups` groups of bf16 weight tiles over n token rows of `width` elements; emit(group, row, column of the group,
// sum).
template <typename Emit>
__device__ __forceinline__ void column_parallel(const Place& place, int n, SegmentSums& sums, const uint16_t* tiles,
                                                int64_t groups, const uint16_t* operand, int64_t width, Emit emit) {
  const int warp = threadIdx.x / 32;
  const int64_t blocks = width / 16, segment = blocks / kSegments;
  for (int64_t group = place.index; group < groups; group += place.size)
    for (int c0 = 0; c0 < n; c0 += kColumns) {
      Accumulators acc;
      clear(acc);
      const Columns x = columns(operand + warp * segment * 16, width, c0, n, nullptr, 1);
      chain_bf16(tiles + (group * blocks + warp * segment) * kTile, segment, x, acc);
      __syncthreads();
      sums.store(acc);
      __syncthreads();
      const int count = min(kColumns, n - c0);
      for (int at = threadIdx.x; at < 16 * count; at += kThreads)
        emit(group, c0 + at / 16, at % 16, sums.total(at % 16, at / 16));
      __syncthreads();
    }
}

}  // namespace muse
