// Attention of one row and one kv head by one block: the row's query heads are the 16 rows of the A operand, eight
// warps take the 128-position chunks of a 2048-position stretch, and chunk results are added in ascending order.
#pragma once

#include "ffi/decode/cuda/dense.cuh"
#include "ffi/decode/cuda/norms.cuh"
#include "ffi/decode/cuda/rows.cuh"

namespace muse {

constexpr int kChunk = 128, kStretch = 2048, kChunksPerStretch = kStretch / kChunk;
constexpr int kMaxGroup = 16;            // query heads per kv head
constexpr int kSumWidth = kHeadDim + 1;  // numerators and the denominator

struct AttentionShared {
  float chunk[kChunksPerStretch][kMaxGroup][kSumWidth];
  float total[kMaxGroup][kSumWidth];
  uint16_t a[kMaxGroup][kHeadDim];
};

struct AttentionUnit {
  const Plan* plan;
  int64_t layer;
  const DeviceRows* rows;
  int row;                // active row
  const uint16_t *k, *v;  // this sequence's and head's cache: [slots, 64]
  const uint16_t* q;      // [heads, 64]
  int heads;
};

__device__ __forceinline__ uint32_t pair_at(const uint16_t* p) { return *reinterpret_cast<const uint32_t*>(p); }

__device__ __forceinline__ uint32_t pack(uint16_t low, uint16_t high) {
  return static_cast<uint32_t>(low) | static_cast<uint32_t>(high) << 16;
}

// One chunk by one warp; leaves numerators and denominator in out.
__device__ inline void attend_chunk(const AttentionUnit& u, int64_t chunk, const uint32_t (&q)[4][4],
                                    float (*out)[kSumWidth]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const Plan& plan = *u.plan;
  const int64_t position = u.rows->position[u.row], first = plan.first_visible(u.layer, position);
  float numerator[8][4] = {}, denominator[4] = {};
  for (int64_t start = chunk * kChunk; start < (chunk + 1) * kChunk; start += 16) {
    if (start + 15 < first || start > position) continue;
    // Lanes 0..15 resolve the block's keys; an unseen one borrows the row's own slot, whose K and V are finite or the
    // row's own, and counts for nothing because its p is +0.
    int64_t slot = 0;
    {
      const int64_t p = start + lane % 16;
      const bool seen = p >= first && p <= position;
      slot = plan.slot(u.layer, u.rows->slot_position(u.row, seen ? p : position));
    }
    float score[2][4] = {};
    for (int n = 0; n < 2; ++n) {
      const uint16_t* key = u.k + __shfl_sync(~0u, slot, 8 * n + g) * kHeadDim;
      for (int b = 0; b < 4; ++b) {
        const uint32_t y[2] = {pair_at(key + 16 * b + 2 * t), pair_at(key + 16 * b + 2 * t + 8)};
        mma_bf16(score[n], q[b], y);
      }
    }
    uint16_t p[2][4];
    for (int n = 0; n < 2; ++n)
      for (int j = 0; j < 4; ++j) {
        const int64_t at = start + 8 * n + 2 * t + (j & 1);
        p[n][j] = at >= first && at <= position ? to_bf16(exp1(score[n][j] * plan.score_scale)) : uint16_t{0};
      }
    const uint32_t a[4] = {pack(p[0][0], p[0][1]), pack(p[0][2], p[0][3]), pack(p[1][0], p[1][1]),
                           pack(p[1][2], p[1][3])};
    const uint32_t ones[2] = {0x3F803F80u, 0x3F803F80u};
    mma_bf16(denominator, a, ones);
    const uint16_t* value[4];
    for (int i = 0; i < 4; ++i) value[i] = u.v + __shfl_sync(~0u, slot, 2 * t + (i & 1) + 8 * (i >> 1)) * kHeadDim + g;
    for (int d = 0; d < 8; ++d) {
      const uint32_t y[2] = {pack(value[0][8 * d], value[1][8 * d]), pack(value[2][8 * d], value[3][8 * d])};
      mma_bf16(numerator[d], a, y);
    }
  }
  for (int j = 0; j < 4; ++j) {
    const int head = g + 8 * (j >> 1);
    for (int d = 0; d < 8; ++d) out[head][8 * d + 2 * t + (j & 1)] = numerator[d][j];
    if (t == 0 && (j & 1) == 0) out[head][kHeadDim] = denominator[j];
  }
}

// R(N / D) of all heads, left in shared.a.
__device__ inline void attend(const AttentionUnit& u, AttentionShared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint32_t q[4][4];
  for (int b = 0; b < 4; ++b)
    for (int j = 0; j < 4; ++j) {
      const int head = g + 8 * (j & 1);
      q[b][j] = head < u.heads ? pair_at(u.q + head * kHeadDim + 16 * b + 2 * t + 8 * (j >> 1)) : 0;
    }
  const int64_t position = u.rows->position[u.row], first = u.plan->first_visible(u.layer, position);
  constexpr int kSums = kMaxGroup * kSumWidth;
  float* total = shared.total[0];
  for (int i = threadIdx.x; i < kSums; i += kThreads) total[i] = 0.0f;
  for (int64_t stretch = first / kStretch; stretch <= position / kStretch; ++stretch) {
    const int64_t begin = stretch * kChunksPerStretch;
    __syncthreads();
    for (int c = warp; c < kChunksPerStretch; c += kWarps) attend_chunk(u, begin + c, q, shared.chunk[c]);
    __syncthreads();
    for (int i = threadIdx.x; i < kSums; i += kThreads) {
      float sum = 0.0f;
      for (int c = 0; c < kChunksPerStretch; ++c) sum = sum + shared.chunk[c][0][i];
      total[i] = total[i] + sum;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < u.heads * kHeadDim; i += kThreads) {
    const float* sums = shared.total[i / kHeadDim];
    shared.a[i / kHeadDim][i % kHeadDim] = to_bf16(sums[i % kHeadDim] / sums[kHeadDim]);
  }
  __syncthreads();
}

}  // namespace muse
