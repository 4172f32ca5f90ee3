// Attention of one row and one kv head over one stretch of 2048 positions by one block: the row's query heads are the
// rows of the A operand, warps take chunks of 128 positions, and chunk results are added in ascending order.
//
// Inside a 16-block the order of products is free (docs/numerics.md 4), so a lane takes four neighbouring dimensions of
// a key (8 bytes), and eight neighbouring dimensions of a value (16 bytes) spread over eight tiles.
#pragma once

#include "ffi/decode/cuda/block.cuh"
#include "ffi/decode/cuda/rows.cuh"
#include "ffi/numerics/elementary.h"
#include "ffi/numerics/mma.cuh"

namespace muse {

constexpr int kChunk = 128, kStretch = 2048, kChunksPerStretch = kStretch / kChunk;
constexpr int kMaxGroup = 8;             // query heads per kv head: the rows of a tile that have an accumulator
constexpr int kSumWidth = kHeadDim + 1;  // numerators and the denominator

struct AttentionUnit {
  const DeviceRows* rows;
  int row;                // active row
  const uint16_t *k, *v;  // this sequence's and head's cache: [slots, 64]
  const uint16_t* q;      // [heads, 64]
  int heads;
  int ring;     // slots of a sliding layer's cache; 0: full
  float scale;  // of scores
};

// Written by other blocks of this launch: past L1.
__device__ __forceinline__ uint2 load_four(const uint16_t* p) { return __ldcg(reinterpret_cast<const uint2*>(p)); }
__device__ __forceinline__ uint4 load_eight(const uint16_t* p) { return __ldcg(reinterpret_cast<const uint4*>(p)); }

// The A operand of all query heads: register r of block b holds (head g, dimensions 16 b + 4 t + 2 r and the next).
__device__ __forceinline__ void load_queries(const AttentionUnit& u, int g, int t, uint32_t (&q)[4][2]) {
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const uint2 two = g < u.heads ? load_four(u.q + g * kHeadDim + 16 * b + 4 * t) : uint2{0, 0};
    q[b][0] = two.x;
    q[b][1] = two.y;
  }
}

// The keys and values of one 16-block as a lane needs them: keys of positions g and 8 + g, values of 2t, 2t+1, 2t+8,
// 2t+9.
struct KeyBlock {
  uint2 key[2][4];
};
struct ValueBlock {
  uint4 value[4];
};

__device__ __forceinline__ void load_keys(const AttentionUnit& u, int slot, int g, int t, KeyBlock& out) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const uint16_t* key = u.k + int64_t{__shfl_sync(~0u, slot, 8 * n + g)} * kHeadDim + 4 * t;
#pragma unroll
    for (int b = 0; b < 4; ++b) out.key[n][b] = load_four(key + 16 * b);
  }
}

__device__ __forceinline__ void load_values(const AttentionUnit& u, int slot, int g, int t, ValueBlock& out) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    out.value[i] = load_eight(u.v + int64_t{__shfl_sync(~0u, slot, 2 * t + (i & 1) + 8 * (i >> 1))} * kHeadDim + 8 * g);
}

// The slot of a block's position lane % 16. An unseen position borrows the row's own slot, whose K and V are finite or
// the row's own, and counts for nothing because its p is +0.
__device__ __forceinline__ int block_slot(const AttentionUnit& u, int start, int first, int position, int lane) {
  const int p = start + lane % 16, seen = p >= first && p <= position ? p : position;
  const int at = static_cast<int>(u.rows->slot_position(u.row, seen));
  return u.ring ? at % u.ring : at;
}

// One chunk by one warp; leaves numerators and denominator in out[head][kSumWidth].
__device__ __forceinline__ void attend_chunk(const AttentionUnit& u, int chunk, int first, int position, float* out) {
  const int lane = thread_index() % 32, g = lane / 4, t = lane % 4;
  uint32_t q[4][2];
  load_queries(u, g, t, q);
  float numerator[8][2] = {}, denominator[2] = {};
  const int begin = max(chunk * kChunk, first / 16 * 16), end = min(chunk * kChunk + kChunk - 1, position);
  KeyBlock keys;
  int slot = 0;
  // The first turn only fetches, so that the code of fetching is there once.
#pragma unroll 1
  for (int start = begin - 16; start <= end; start += 16) {
    const bool inside = start >= begin;
    float score[2][2] = {};
    ValueBlock values;
    if (inside) {
      load_values(u, slot, g, t, values);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int b = 0; b < 4; ++b) mma_bf16_low(score[n], q[b], keys.key[n][b]);
    }
    if (start + 16 <= end) load_keys(u, slot = block_slot(u, start + 16, first, position, lane), g, t, keys);
    if (!inside) continue;
    uint32_t p[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      uint16_t own[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int at = start + 8 * n + 2 * t + j;
        own[j] = at >= first && at <= position ? to_bf16(exp1(score[n][j] * u.scale)) : uint16_t{0};
      }
      p[n] = static_cast<uint32_t>(own[0]) | static_cast<uint32_t>(own[1]) << 16;
    }
    // Times ones; then column g of tile d is dimension 8 g + d.
    mma_bf16_low(denominator, p, {0x3F803F80u, 0x3F803F80u});
#pragma unroll
    for (int d = 0; d < 8; ++d) {
      const auto element = [&](int i) {
        const uint4& v = values.value[i];
        return d < 4 ? (d < 2 ? v.x : v.y) : d < 6 ? v.z : v.w;
      };
      const uint32_t select = d % 2 ? 0x7632u : 0x5410u;
      mma_bf16_low(numerator[d], p,
                   {__byte_perm(element(0), element(1), select), __byte_perm(element(2), element(3), select)});
    }
  }
  if (g >= u.heads) return;
#pragma unroll
  for (int j = 0; j < 2; ++j)
#pragma unroll
    for (int d = 0; d < 8; ++d) out[g * kSumWidth + 8 * (2 * t + j) + d] = numerator[d][j];
  if (t == 0) out[g * kSumWidth + kHeadDim] = denominator[0];
}

}  // namespace muse
