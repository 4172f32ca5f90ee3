// Attention of one row and one kv head over a chunk of 128 positions by one block. First each warp takes one of the
// chunk's eight 16-blocks: scores and exponentials, and its values rearranged; then each warp takes one of eight tiles
// of the numerators and chains it over the 16-blocks. The row's query heads are the rows of the A operand.
//
// Inside a 16-block the order of products is free (docs/numerics.md 4), so a lane takes four neighbouring dimensions of
// a key (8 bytes), and eight neighbouring dimensions of a value (16 bytes) spread over eight tiles.
#pragma once

#include "ffi/decode/cuda/block.cuh"
#include "ffi/decode/cuda/rows.cuh"
#include "ffi/numerics/elementary.h"
#include "ffi/numerics/mma.cuh"

namespace muse {

constexpr int kChunk = 128, kStretch = 2048;
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

constexpr int kChunkBlocks = kChunk / 16;
static_assert(kChunkBlocks == kWarps && kHeadDim / 8 == kWarps, "a warp per 16-block, then a warp per numerator tile");

// What the two halves of a chunk's work pass to each other, lane by lane: exponentials as A operand, values as B
// operand.
struct ChunkShared {
  uint2 p[kChunkBlocks][32];
  uint2 value[kChunkBlocks][kHeadDim / 8][32];
};

__device__ __forceinline__ bool block_visible(int start, int first, int position) {
  return start + 15 >= first && start <= position;
}

// By one warp: the 16-block that starts at position `start`.
__device__ __forceinline__ void attend_block(const AttentionUnit& u, int start, int first, int position, int lane,
                                             uint2 (&p)[32], uint2 (*value)[32]) {
  if (!block_visible(start, first, position)) return;
  const int g = lane / 4, t = lane % 4, slot = block_slot(u, start, first, position, lane);
  uint32_t q[4][2];
  KeyBlock keys;
  ValueBlock values;
  load_queries(u, g, t, q);
  load_keys(u, slot, g, t, keys);
  load_values(u, slot, g, t, values);
  uint32_t own[2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    float score[2] = {};
#pragma unroll
    for (int b = 0; b < 4; ++b) mma_bf16_low(score, q[b], keys.key[n][b]);
    uint16_t e[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int at = start + 8 * n + 2 * t + j;
      e[j] = at >= first && at <= position ? to_bf16(exp1(score[j] * u.scale)) : uint16_t{0};
    }
    own[n] = static_cast<uint32_t>(e[0]) | static_cast<uint32_t>(e[1]) << 16;
  }
  p[lane] = {own[0], own[1]};
  // Column g of tile d is dimension 8 g + d.
#pragma unroll
  for (int d = 0; d < 8; ++d) {
    const auto element = [&](int i) {
      const uint4& v = values.value[i];
      return d < 4 ? (d < 2 ? v.x : v.y) : d < 6 ? v.z : v.w;
    };
    const uint32_t select = d % 2 ? 0x7632u : 0x5410u;
    value[d][lane] = {__byte_perm(element(0), element(1), select), __byte_perm(element(2), element(3), select)};
  }
}

// One chunk by the block; numerators and denominator go to out[head][kSumWidth], which may be global memory.
__device__ __forceinline__ void attend_chunk(const AttentionUnit& u, int chunk, int first, int position,
                                             ChunkShared& shared, float* out) {
  const int warp = thread_index() / 32, lane = thread_index() % 32, g = lane / 4, t = lane % 4;
  attend_block(u, chunk * kChunk + 16 * warp, first, position, lane, shared.p[warp], shared.value[warp]);
  sync_block();
  float numerator[2] = {}, denominator[2] = {};
#pragma unroll
  for (int b = 0; b < kChunkBlocks; ++b) {
    if (!block_visible(chunk * kChunk + 16 * b, first, position)) continue;
    const uint2 p = shared.p[b][lane];
    const uint32_t a[2] = {p.x, p.y};
    mma_bf16_low(numerator, a, shared.value[b][warp][lane]);
    if (warp == 0) mma_bf16_low(denominator, a, {0x3F803F80u, 0x3F803F80u});  // ones
  }
  if (g < u.heads) {
#pragma unroll
    for (int j = 0; j < 2; ++j) out[g * kSumWidth + 8 * (2 * t + j) + warp] = numerator[j];
    if (warp == 0 && t == 0) out[g * kSumWidth + kHeadDim] = denominator[0];
  }
}

}  // namespace muse
