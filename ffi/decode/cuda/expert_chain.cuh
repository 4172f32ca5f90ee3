// One warp's chain over a K segment of an expert's 16 rows: weights from the ring are the A operand, at most eight
// tokens' rows the B operand, in registers.
#pragma once

#include <cuda_fp16.h>

#include "ffi/decode/cuda/ring.cuh"
#include "ffi/decode/cuda/schedule.h"
#include "ffi/decode/workspace.h"
#include "ffi/device/ptx.cuh"

namespace muse {

enum class ExpertKind { kBf16, kW4A16, kW4A4 };

// B operand of so many 16-blocks: for W4A4, whose inner loop has no time for loads, a whole segment of 512; else as
// much as a bf16 chunk or a panel needs.
template <int kBlocks>
using TokenOperand = uint32_t[kBlocks][2];
constexpr int kSpanBlocks = 32;
static_assert(kPanelBlocks == kSlotTiles);

// Codes as they travel: of numbers 2t, 2t+1, 2t+8 and 2t+9 of a 16-block, in a word with the block's scale. The first
// two stand where fp16 has them (below), the others three bits lower, and the scale's nibbles at the halves' ends.
__device__ __forceinline__ uint32_t code_bits(uint32_t code, int j) {  // of number j
  return ((code & 7u) << 9 | code >> 3 << 15) >> (j / 8 * 3) << (j % 2 * 16);
}
__device__ __forceinline__ uint32_t scale_bits(uint8_t scale) {
  return (scale & 0xFu) | static_cast<uint32_t>(scale >> 4) << 16;
}

// And what they stand for, exact in fp16: both registers.
__device__ __forceinline__ void code_numbers(uint32_t word, uint32_t (&x)[2]) {
  constexpr uint32_t kMask = 0x8E008E00u;
  const uint32_t scale = (word & 0xFu) | (word >> 12 & 0xF0u);
  const auto scales = bit_cast<__half2>(ptx::halves_from_e4m3x2(static_cast<uint16_t>(scale * 0x101u)));
  const auto number = [&](uint32_t bits) {  // times 2^-14
    return bit_cast<uint32_t>(
        __hmul2(__hmul2(bit_cast<__half2>(bits), __half2half2(__float2half_rn(16384.0f))), scales));
  };
  x[0] = number(word & kMask);
  x[1] = number(word << 3 & kMask);
}

// The lane's registers of the blocks from `first` on of a segment of a row (column g's) that has come; it has `count`
// blocks, the others become zeros. t = lane % 4.
template <ExpertKind kKind, int kBlocks>
__device__ __forceinline__ void load_tokens(const uint64_t* row, int first, int count, int t,
                                            TokenOperand<kBlocks>& x) {
  constexpr int kPieceBlocks = kKind == ExpertKind::kW4A4 ? 2 : 1;
  const uint4* from = reinterpret_cast<const uint4*>(row + first / kPieceBlocks * kPieceWords) + t;
#pragma unroll
  for (int b = 0; b < kBlocks; b += kPieceBlocks) {
    const uint4 two = first + b < count ? __ldcg(from + b / kPieceBlocks * (kPieceWords / 2)) : uint4{0, 0, 0, 0};
    if constexpr (kKind == ExpertKind::kW4A4) {
      code_numbers(two.x, x[b]);
      code_numbers(first + b + 1 < count ? two.z : 0u, x[b + 1]);
    } else {
      x[b][0] = two.x, x[b][1] = two.z;
    }
  }
}

// Eight scales of the lane's two rows from a panel, by block.
struct PanelScales {
  uint32_t word[4];
  __device__ __forceinline__ float2 of(int block) const {
    return ptx::from_e4m3x2(static_cast<uint16_t>(word[block / 2] >> (16 * (block % 2))));
  }
};

__device__ __forceinline__ PanelScales panel_scales(const unsigned char* panel, int lane) {
  const uint4 v = *reinterpret_cast<const uint4*>(panel + panel_scale(0, lane / 4));
  return {{v.x, v.y, v.z, v.w}};
}

// Codes become fp16 numbers code * 2^-14 by shift and mask (layout.h); the shifts are products, which run in another
// pipe than the masks. Of the last two registers magnitudes and signs move by different distances: one product with the
// sum of two powers moves both, and what it moves wrongly lies outside the mask, with no carry into it. Sums are 2^-14
// of what they mean until the last one (kCodeScale).
constexpr float kCodeScale = 0x1p14f;

__device__ __forceinline__ void codes_to_fp16(uint32_t word, uint32_t (&a)[4]) {
  constexpr uint32_t kMask = 0x8E008E00u;
  a[0] = word & kMask;
  a[1] = (word * 8u) & kMask;
  a[2] = ((word & 0x40384038u) * (64u + 2u)) & kMask;
  a[3] = ((word & 0x20072007u) * (512u + 4u)) & kMask;
}

// W4A16: code times block scale is an exact bf16 number, the truncated fp32 product.
__device__ __forceinline__ void codes_to_bf16(uint32_t word, float2 scale, uint32_t (&a)[4]) {
  for (int j = 0; j < 4; ++j) {
    const float s = j & 1 ? scale.y : scale.x;
    const uint32_t low = bit_cast<uint32_t>(from_e2m1(fragment_code(word, j, 0)) * s);
    const uint32_t high = bit_cast<uint32_t>(from_e2m1(fragment_code(word, j, 1)) * s);
    a[j] = low >> 16 | (high & 0xFFFF0000u);
  }
}

// W4A4: acc += the chain over a chunk's panels: a block's exact sum from a zero accumulator, then its scale; the token
// operand carries its own block scale. Four blocks' products run in the tensor core while the four before are scaled
// and added. A chunk of fewer panels reads its last one again: x is zero there, which changes no bit of a sum, and code
// without branches is scheduled better.
__device__ __forceinline__ void chain_codes(const unsigned char* chunk, int panels, int lane,
                                            const TokenOperand<kSpanBlocks>& x, float (&acc)[4]) {
  constexpr int kGroup = 4;
  float sum[2][kGroup][4];
  float2 scale[2][kGroup];
  const auto add = [&](int which) {
#pragma unroll
    for (int e = 0; e < kGroup; ++e) {
      acc[0] = fma1(sum[which][e][0], scale[which][e].x, acc[0]);
      acc[1] = fma1(sum[which][e][1], scale[which][e].x, acc[1]);
      acc[2] = fma1(sum[which][e][2], scale[which][e].y, acc[2]);
      acc[3] = fma1(sum[which][e][3], scale[which][e].y, acc[3]);
    }
  };
#pragma unroll
  for (int group = 0; group < kSpanBlocks / kGroup; ++group) {
    constexpr int kInPanel = kPanelBlocks / kGroup;
    const int which = group % 2, b = group % kInPanel * kGroup;
    const unsigned char* panel = chunk + min(group / kInPanel, panels - 1) * kPanelBytes;
    const PanelScales scales = panel_scales(panel, lane);
    const uint4 words = *reinterpret_cast<const uint4*>(panel + panel_code(b, lane));
#pragma unroll
    for (int e = 0; e < kGroup; ++e) {
      uint32_t a[4];
      codes_to_fp16(e == 0 ? words.x : e == 1 ? words.y : e == 2 ? words.z : words.w, a);
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[which][e][j] = 0.0f;
      ptx::mma_fp16(sum[which][e], a, x[group * kGroup + e]);
      scale[which][e] = scales.of(b + e);
    }
    if (group > 0) add(1 - which);
  }
  add(1);
}

// W4A16: acc += the chain over one panel, whose weights are exact bf16 numbers.
__device__ __forceinline__ void chain_panel(const unsigned char* panel, int lane, const TokenOperand<kPanelBlocks>& x,
                                            float (&acc)[4]) {
  const PanelScales scales = panel_scales(panel, lane);
#pragma unroll
  for (int b = 0; b < kPanelBlocks; b += 4) {
    const uint4 words = *reinterpret_cast<const uint4*>(panel + panel_code(b, lane));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      uint32_t a[4];
      codes_to_bf16(e == 0 ? words.x : e == 1 ? words.y : e == 2 ? words.z : words.w, scales.of(b + e), a);
      ptx::mma_bf16(acc, a, x[b + e]);
    }
  }
}

// acc += the chain over a chunk of bf16 tiles.
__device__ __forceinline__ void chain_expert_tiles(const unsigned char* chunk, int tiles, int lane,
                                                   const TokenOperand<kSlotTiles>& x, float (&acc)[4]) {
#pragma unroll
  for (int b = 0; b < kSlotTiles; ++b) {
    if (b >= tiles) break;
    const uint4 w = reinterpret_cast<const uint4*>(chunk)[b * 32 + lane];
    const uint32_t a[4] = {w.x, w.y, w.z, w.w};
    ptx::mma_bf16(acc, a, x[b]);
  }
}

}  // namespace muse
