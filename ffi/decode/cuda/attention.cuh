// Attention of up to eight rows of a sequence and one kv head over chunks of 128 positions by one block. In each chunk
// first each warp takes one of the eight 16-blocks: scores and exponentials of all rows; then each warp takes two of
// the eight tiles of the numerators for half of the rows and chains them over the 16-blocks. The query heads of two
// rows are the rows of an A operand.
//
// Inside a 16-block the order of products is free (docs/numerics.md 4), so a lane takes four neighbouring dimensions of
// a key (8 bytes).
#pragma once

#include "ffi/decode/cuda/step.cuh"
#include "ffi/device/ptx.cuh"
#include "ffi/numerics/elementary.h"

namespace muse {

constexpr int kMaxGroup = 8;                         // query heads per kv head: half of an A operand's rows
constexpr int kRowTiles = (1 << kUnitRowsLog2) / 2;  // A operands of a unit
constexpr int kChunkBlocks = kChunk / 16, kHeadTiles = kHeadDim / 8;
constexpr int kWarpTiles = kRowTiles / 2;  // that a warp chains
static_assert(kChunkBlocks == kWarps && kHeadTiles == kWarps,
              "a warp per 16-block, then a warp per two tiles and half");

struct AttentionUnit {
  const uint16_t *k, *v;  // this sequence's and head's cache: [slots, 64]
  uint64_t* sums;    // where its first sums go: slots, of each row [heads][64] numerators, then [heads] denominators
  int stride;        // from row to row
  int member, rows;  // the first in AttentionSchedule::member
  int begin, end;    // chunks
  int first;         // position that the rows may see: only from there on is loaded
  int head;
  bool own;  // of one row, with positions in flight
};

// What the warps pass to each other; A operands lane by lane.
struct AttentionShared {
  uint4 q[kRowTiles][kHeadDim / 16][32];
  uint4 p[kRowTiles][kChunkBlocks][32];
  // Of even and odd chunks; a position's pieces of 16 bytes permuted. A unit of one chunk has its keys in the other's
  // place.
  uint16_t value[2][kChunk][kHeadDim];
  AttentionUnit unit[kWarps];  // each warp's own copy, so that none need wait for another
};

// A warp's share of the sums: of query head g of each two rows 2 x 2 numerators; the denominators of one operand.
struct AttentionSums {
  float numerator[kWarpTiles][2][4];
  float denominator[4];
};

// Not negative, as the compiler sees.
__device__ __forceinline__ int warp_index() { return static_cast<int>(static_cast<uint32_t>(thread_index()) / 32); }
__device__ __forceinline__ int lane_index() { return static_cast<int>(static_cast<uint32_t>(thread_index()) % 32); }

// Past L1, whose place the ring takes.
__device__ __forceinline__ uint2 load_four(const uint16_t* p) { return __ldcg(reinterpret_cast<const uint2*>(p)); }

__device__ __forceinline__ void mma_bf16(float (&d)[4], uint4 a, uint2 b) {
  ptx::mma_bf16(d, {a.x, a.y, a.z, a.w}, {b.x, b.y});
}

// The keys of one 16-block as a lane needs them: of positions g and 8 + g.
struct KeyBlock {
  uint2 key[2][4];
};

// The slot of position `start` + lane % 16, which is committed. A position that no row of the unit sees borrows the
// slot of the first that some row sees, whose V is finite, and counts for nothing because its p is +0.
__device__ __forceinline__ int block_slot(const CacheSlots& slots, int first, int start) {
  return slots.of(max(start + lane_index() % 16, first));
}

__device__ __forceinline__ void load_keys(const uint16_t* k, int slot, KeyBlock& keys) {
  const int lane = lane_index(), g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const uint16_t* key = k + __shfl_sync(~0u, slot, 8 * n + g) * kHeadDim + 4 * t;
#pragma unroll
    for (int b = 0; b < 4; ++b) keys.key[n][b] = load_four(key + 16 * b);
  }
}

// Those of a chunk that lie in shared memory, a position's pieces permuted as those of values.
__device__ __forceinline__ void load_keys(const uint16_t (&from)[kChunk][kHeadDim], KeyBlock& keys) {
  const int warp = warp_index(), lane = lane_index(), g = lane / 4, t = lane % 4, at = 8 * (t / 2 ^ g) + t % 2 * 4;
#pragma unroll
  for (int b = 0; b < 4; ++b)
#pragma unroll
    for (int n = 0; n < 2; ++n)
      keys.key[n][b] = *reinterpret_cast<const uint2*>(from[16 * warp + g] + (at ^ 16 * b) + 8 * n * kHeadDim);
}

// Starts to bring the values of the warp's 16-block of a chunk to shared memory and its keys near: there are no
// registers for keys that early. One piece of code.
inline __device__ __noinline__ void prefetch_block(const uint16_t* k, const uint16_t* v, int chunk, int slot,
                                                   AttentionShared& shared) {
  const int lane = lane_index();
  ptx::prefetch_l2(k + slot * kHeadDim);
  // Row lane / 8 + 4 i, piece lane % 8.
  const uint16_t* value = v + 8 * (lane % 8);
  const uint32_t row = ptx::shared_address(shared.value[chunk & 1][16 * warp_index() + lane / 8]);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int from = __shfl_sync(~0u, slot, 4 * i + lane / 8) * kHeadDim, piece = lane % 8 ^ lane / 8 ^ i % 2 * 4;
    ptx::copy16(row + 512 * i + 16 * piece, value + from);
  }
}

// One round of prefetch_block is over; waits for the round before.
__device__ __forceinline__ void next_values() { ptx::commit_copies(); }
__device__ __forceinline__ void wait_values() { ptx::wait_copies<1>(); }

// B operands of two numerator tiles over a chunk's 16-block b: dimensions 16 `tiles` to + 15.
__device__ __forceinline__ uint4 value_operands(const AttentionShared& shared, int chunk, int b, int tiles, int lane) {
  const int position = lane % 16, piece = 2 * tiles + lane / 16;
  uint32_t m[4];
  ptx::ldmatrix_x4_trans(m,
                         ptx::shared_address(shared.value[chunk & 1][16 * b + position]) + 16 * (piece ^ position % 8));
  return {m[0], m[1], m[2], m[3]};
}

// Out of the way of the usual.
__device__ __noinline__ float rare_exp1(float x) { return exp1(x); }

// The exponentials of a warp's 16-block at `start` for all rows, each masked by what the row sees.
__device__ __forceinline__ void score_rows(const AttentionSchedule& schedule, int window, const AttentionUnit& u,
                                           const DeviceRows& rows, int start, const KeyBlock& keys,
                                           AttentionShared& shared) {
  const int warp = warp_index(), lane = lane_index(), own = start + 2 * (lane % 4);
#pragma unroll 1
  for (int tile = 0; 2 * tile < u.rows; ++tile) {
    float score[2][4] = {};
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const uint4 q = shared.q[tile][b][lane];
#pragma unroll
      for (int n = 0; n < 2; ++n) mma_bf16(score[n], q, keys.key[n][b]);
    }
    bool usual = true;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        score[n][e] = score[n][e] * schedule.scale;
        usual = usual && fabsf(score[n][e]) < kUsualExp;
      }
    }
    usual = __all_sync(~0u, usual);
    int position[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      position[r] = 2 * tile + r < u.rows ? rows.position[schedule.member[u.member + 2 * tile + r]] : -1;
    uint2* out = reinterpret_cast<uint2*>(&shared.p[tile][warp][lane]);
#pragma unroll 1  // one copy of the exponentials, out of a cold instruction cache: the halves change places
    for (int n = 0; n < 2; ++n) {
      float p[4];
      if (usual) {  // one branch for all: they then run side by side
#pragma unroll
        for (int e = 0; e < 4; ++e) p[e] = usual_exp1(score[0][e]);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) p[e] = rare_exp1(score[0][e]);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        score[0][e] = score[1][e];
        const int at = own + 8 * n + e % 2, seen = position[e / 2];
        if (at > seen || at <= seen - window) p[e] = 0.0f;
      }
      out[n] = {pack(to_bf16(p[0]), to_bf16(p[1])), pack(to_bf16(p[2]), to_bf16(p[3]))};
    }
  }
}

// Adds the sums of the chunk whose operands lie in `shared`. A warp has one tile or two. All warps add up denominators
// as well, of the first or the second tile in turn, so that no step asks: store_part knows which count.
__device__ __forceinline__ void add_chunk(int rows, int chunk, const AttentionShared& shared, AttentionSums& sums) {
  const int warp = warp_index(), lane = lane_index(), half = warp / 4, quarter = warp % 4;
  static_assert(kWarpTiles == 2);
  if (2 * half >= rows) return;
  const bool both = 2 * (2 + half) < rows, second = quarter % 2 != 0;
  const uint2 ones{0x3F803F80u, 0x3F803F80u};
  float numerator[kWarpTiles][2][4] = {}, denominator[4] = {};
  // Operands of this block and of the next, which are on their way.
  uint4 p[2] = {shared.p[half][0][lane]}, other{}, value[2] = {value_operands(shared, chunk, 0, quarter, lane)};
  if (both) other = shared.p[2 + half][0][lane];
#pragma unroll 1
  for (int first = 0; first < kChunkBlocks; first += 2) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int next = (first + e + 1) % kChunkBlocks;
      p[1 - e] = shared.p[half][next][lane];
      value[1 - e] = value_operands(shared, chunk, next, quarter, lane);
      const uint2 low{value[e].x, value[e].y}, high{value[e].z, value[e].w};
      mma_bf16(numerator[0][0], p[e], low);
      mma_bf16(numerator[0][1], p[e], high);
      uint4 counted = p[e];
      if (both) {
        mma_bf16(numerator[1][0], other, low);
        mma_bf16(numerator[1][1], other, high);
        if (second) counted = other;
        other = shared.p[2 + half][next][lane];
      }
      mma_bf16(denominator, counted, ones);
    }
  }
#pragma unroll
  for (int i = 0; i < kWarpTiles; ++i)
#pragma unroll
    for (int d = 0; d < 2; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums.numerator[i][d][e] = sums.numerator[i][d][e] + numerator[i][d][e];
#pragma unroll
  for (int e = 0; e < 4; ++e) sums.denominator[e] = sums.denominator[e] + denominator[e];
}

// Stores the sums at `out`, `more`: with what this thread stored there earlier. They are zeros then.
__device__ __forceinline__ void store_part(int group, const AttentionUnit& u, AttentionSums& sums, uint64_t* out,
                                           uint32_t epoch, bool more) {
  const int warp = warp_index(), lane = lane_index(), half = warp / 4, quarter = warp % 4, g = lane / 4, t = lane % 4;
  const int numerators = g * kHeadDim + 16 * quarter + 2 * t, denominators = group * kHeadDim + g;
  const auto word = [epoch](float x) { return slot_word(bit_cast<uint32_t>(x), epoch); };
  const int rows = g < group ? u.rows : 0, stride = u.stride;
#pragma unroll 1  // one copy of the code: the tiles change places
  for (int i = 0; i < kWarpTiles; ++i) {
    const int row = 2 * (2 * i + half);
    const bool counted = quarter == i && t == 0;  // denominators
    uint64_t* first = out + row * stride;
    auto& numerator = sums.numerator[0];
    if (more) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (row + r >= rows) break;
        uint64_t* of_row = first + r * stride;
        uint64_t old[2][2];
#pragma unroll
        for (int d = 0; d < 2; ++d) ptx::load_relaxed_gpu_v2(of_row + numerators + 8 * d, old[d]);
        if (counted)
          sums.denominator[2 * r] = slot_number(ptx::load_relaxed_sys(of_row + denominators)) + sums.denominator[2 * r];
#pragma unroll
        for (int d = 0; d < 2; ++d)
#pragma unroll
          for (int e = 0; e < 2; ++e) numerator[d][2 * r + e] = slot_number(old[d][e]) + numerator[d][2 * r + e];
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + r >= rows) break;
      uint64_t* of_row = first + r * stride;
#pragma unroll
      for (int d = 0; d < 2; ++d)
        ptx::store_relaxed_gpu_v2(of_row + numerators + 8 * d, word(numerator[d][2 * r]),
                                  word(numerator[d][2 * r + 1]));
      if (counted) store_slot(of_row + denominators, bit_cast<uint32_t>(sums.denominator[2 * r]), epoch);
    }
#pragma unroll
    for (int d = 0; d < 2; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) numerator[d][e] = sums.numerator[1][d][e];
  }
  sums = {};
}

}  // namespace muse
