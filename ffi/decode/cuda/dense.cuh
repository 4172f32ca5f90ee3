// GEMM pieces on tensor cores: weights are the A operand (16 output rows), tokens the B operand (8 columns each).
//
// Token operands lie in memory as rows whose 16-blocks are permuted so that lane (g, t) reads its two B registers of a
// block, k 2t, 2t+1, 2t+8, 2t+9 of column g, with one 8-byte load.
#pragma once

#include "ffi/decode/layout.h"
#include "ffi/numerics/mma.cuh"
#include "ffi/numerics/reduce.h"

namespace muse {

constexpr int kColumns = 16;  // tokens of one pass: two B tiles share every weight fragment

// Where element k of a row stands in the permuted row.
__device__ __forceinline__ int64_t permuted(int64_t k) {
  return (k & ~int64_t{15}) + ((k & 7) >> 1) * 4 + ((k >> 3) & 1) * 2 + (k & 1);
}

// Weights are read once and by one warp: keep them out of L1. Not volatile, so that the compiler may issue the loads of
// the next tiles before the products of this one; the data is constant for the whole launch.
__device__ __forceinline__ uint4 load_stream16(const void* p) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

__device__ __forceinline__ uint32_t load_stream4(const void* p) {
  uint32_t v;
  asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}

// The lane's two token rows (column g of each B tile), at its place inside a block.
struct Columns {
  const uint2* row[2];
};

__device__ __forceinline__ Columns columns_of(const uint16_t* first, const uint16_t* second) {
  const int t = threadIdx.x % 4;
  return {{reinterpret_cast<const uint2*>(first) + t, reinterpret_cast<const uint2*>(second) + t}};
}

using Accumulators = float[2][4];

__device__ __forceinline__ void clear(Accumulators& acc) {
  for (int n = 0; n < 2; ++n)
    for (int j = 0; j < 4; ++j) acc[n][j] = 0.0f;
}

// acc = chain over `blocks` blocks of bf16 tiles.
__device__ __forceinline__ void chain_bf16(const uint16_t* tiles, int64_t blocks, const Columns& x, Accumulators& acc) {
  const int lane = threadIdx.x % 32;
#pragma unroll 8
  for (int64_t b = 0; b < blocks; ++b) {
    const uint4 w = load_stream16(tiles + b * kTile + lane * 8);
    const uint32_t a[4] = {w.x, w.y, w.z, w.w};
    for (int n = 0; n < 2; ++n) {
      const uint2 v = x.row[n][b * 4];
      const uint32_t y[2] = {v.x, v.y};
      mma_bf16(acc[n], a, y);
    }
  }
}

// W4A16: code times block scale is an exact bf16 number, the truncated fp32 product.
__device__ __forceinline__ void chain_w4a16(const uint32_t* tiles, const uint8_t* scales, int64_t blocks,
                                            const Columns& x, Accumulators& acc) {
  const int lane = threadIdx.x % 32, g = lane / 4;
#pragma unroll 4
  for (int64_t b = 0; b < blocks; ++b) {
    const uint32_t word = load_stream4(tiles + b * kTileWords + lane);
    const float scale[2] = {from_e4m3(scales[b * kTileScales + g]), from_e4m3(scales[b * kTileScales + g + 8])};
    uint32_t a[4];
    for (int j = 0; j < 4; ++j) {
      const uint32_t low = bit_cast<uint32_t>(from_e2m1(fragment_code(word, j, 0)) * scale[j & 1]);
      const uint32_t high = bit_cast<uint32_t>(from_e2m1(fragment_code(word, j, 1)) * scale[j & 1]);
      a[j] = low >> 16 | (high & 0xFFFF0000u);
    }
    for (int n = 0; n < 2; ++n) {
      const uint2 v = x.row[n][b * 4];
      const uint32_t y[2] = {v.x, v.y};
      mma_bf16(acc[n], a, y);
    }
  }
}

// Weight codes become fp16 numbers code * 2^-14 by shift and mask; token scales carry the 2^14 back.
constexpr float kCodeScale = 0x1p14f;

// W4A4: each block's exact sum from a zero accumulator, scaled and added with one rounding. x_scale: per B tile the
// fp32 scales (times kCodeScale) of columns 2t and 2t+1, one per block.
__device__ __forceinline__ void chain_w4a4(const uint32_t* tiles, const uint8_t* scales, int64_t blocks,
                                           const Columns& x, const float* const (&x_scale)[2][2], Accumulators& acc) {
  const int lane = threadIdx.x % 32, g = lane / 4;
#pragma unroll 8
  for (int64_t b = 0; b < blocks; ++b) {
    const uint32_t word = load_stream4(tiles + b * kTileWords + lane);
    const float scale[2] = {from_e4m3(scales[b * kTileScales + g]), from_e4m3(scales[b * kTileScales + g + 8])};
    const uint32_t a[4] = {word & 0x8E008E00u, (word << 3) & 0x8E008E00u,
                           ((word << 6) & 0x0E000E00u) | ((word << 1) & 0x80008000u),
                           ((word << 9) & 0x0E000E00u) | ((word << 2) & 0x80008000u)};
    for (int n = 0; n < 2; ++n) {
      const uint2 v = x.row[n][b * 4];
      const uint32_t y[2] = {v.x, v.y};
      float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      mma_fp16(sum, a, y);
      for (int j = 0; j < 4; ++j) acc[n][j] = fma1(sum[j], scale[j >> 1] * x_scale[n][j & 1][b], acc[n][j]);
    }
  }
}

// Segment sums of one 16-row group: eight warps, one segment each.
struct SegmentSums {
  float value[kSegments][16][kColumns + 1];  // + 1: rows fall into different banks

  __device__ void store(const Accumulators& acc) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int n = 0; n < 2; ++n)
      for (int j = 0; j < 4; ++j) value[warp][g + 8 * (j >> 1)][8 * n + 2 * t + (j & 1)] = acc[n][j];
  }

  __device__ float total(int row, int column) const {
    float s[kSegments];
    for (int i = 0; i < kSegments; ++i) s[i] = value[i][row][column];
    return tree8(s);
  }
};

}  // namespace muse
