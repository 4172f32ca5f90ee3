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

// And what they stand for, times kTokenScale, of two blocks: both registers of each. A number's bits are its code times
// 2^-14, so that with a scale times 2^7, which is in fp16's range, the product is exact.
constexpr float kTokenScale = 0x1p-7f;
__device__ __forceinline__ void code_numbers(uint32_t first, uint32_t second, uint32_t (&x)[2], uint32_t (&y)[2]) {
  constexpr uint32_t kMask = 0x8E008E00u, kScale = 0x000F000Fu;
  const uint32_t nibbles = (first & kScale) + (second & kScale) * 256u, scales = nibbles | nibbles >> 12;
  const __half2 both = __hmul2(bit_cast<__half2>(ptx::halves_from_e4m3x2(static_cast<uint16_t>(scales))),
                               __half2half2(__float2half_rn(128.0f)));
  const auto number = [](uint32_t bits, __half scale) {
    return bit_cast<uint32_t>(__hmul2(bit_cast<__half2>(bits), __half2half2(scale)));
  };
  x[0] = number(first & kMask, __low2half(both));
  x[1] = number(first * 8u & kMask, __low2half(both));
  y[0] = number(second & kMask, __high2half(both));
  y[1] = number(second * 8u & kMask, __high2half(both));
}

// The lane's registers of the blocks from `first` on of a segment of a row (column g's) that has come; it has `count`
// blocks, the others become zeros. t = lane % 4.
template <int kBlocks>
__device__ __forceinline__ void load_tokens(const uint64_t* row, int first, int count, int t,
                                            TokenOperand<kBlocks>& x) {
  const uint4* from = reinterpret_cast<const uint4*>(row + first * kPieceWords) + t;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const uint4 two = first + b < count ? __ldcg(from + b * (kPieceWords / 2)) : uint4{0, 0, 0, 0};
    x[b][0] = two.x, x[b][1] = two.z;
  }
}

// The same of a whole segment's codes, which are slot words of `epoch`; false: some are not there yet. kAll: the
// segment has as many blocks as x; otherwise what lies behind it is read and not used.
template <bool kAll>
__device__ __forceinline__ bool load_codes(const uint64_t* row, int count, int t, uint32_t epoch,
                                           TokenOperand<kSpanBlocks>& x) {
  uint32_t wrong = 0;  // bits of epochs; no branches
  uint64_t two[kSpanBlocks / 2][2];
#pragma unroll
  for (int p = 0; p < kSpanBlocks / 2; ++p) ptx::load_relaxed_sys_v2(row + p * kPieceWords + 2 * t, two[p]);
#pragma unroll
  for (int p = 0; p < kSpanBlocks / 2; ++p) {
    uint32_t word[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const bool own = kAll || 2 * p + e < count;
      wrong |= own ? static_cast<uint32_t>(two[p][e] >> 32) ^ epoch : 0u;
      word[e] = own ? static_cast<uint32_t>(two[p][e]) : 0u;
    }
    code_numbers(word[0], word[1], x[2 * p], x[2 * p + 1]);
  }
  return wrong == 0;
}

// Eight scales of the lane's two rows from a panel, by block.
struct PanelScales {
  uint32_t word[4];
  __device__ __forceinline__ float2 of(int block) const {
    return ptx::from_e4m3x2(static_cast<uint16_t>(word[block / 2] >> (16 * (block % 2))));
  }
};

// A chunk's scales as fp32, by pairs of blocks: of rows g and g + 8 of both, in shared memory of the warp. In registers
// four lanes would convert each of them for themselves.
using ChunkScales = float4[kSpanBlocks / 2][8];

__device__ __forceinline__ PanelScales panel_scales(const unsigned char* panel, int lane) {
  const uint4 v = *reinterpret_cast<const uint4*>(panel + panel_scale(0, lane / 4));
  return {{v.x, v.y, v.z, v.w}};
}

// Codes become fp16 numbers code * 2^-14 by shift and mask (layout.h); the shifts are products, which run in another
// pipe than the masks. Of the last two registers magnitudes and signs move by different distances: one product with the
// sum of two powers moves both, and what it moves wrongly lies outside the mask, with no carry into it. Sums are 2^-14
// kTokenScale of what they mean until the last one (kCodeScale).
constexpr float kCodeScale = 0x1p14f / kTokenScale;

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
                                            const TokenOperand<kSpanBlocks>& x, ChunkScales& scales, float (&acc)[4]) {
  constexpr int kGroup = 4;
  float sum[2][kGroup][4];
  const int g = lane / 4;
  __syncwarp();  // the last chunk's have been read
  {
    const int of = lane / 8;  // a lane per panel and g
    const PanelScales own = panel_scales(chunk + min(of, panels - 1) * kPanelBytes, lane % 8 * 4);
#pragma unroll
    for (int b = 0; b < kPanelBlocks; b += 2) {
      const float2 first = own.of(b), second = own.of(b + 1);
      scales[(of * kPanelBlocks + b) / 2][lane % 8] = {first.x, first.y, second.x, second.y};
    }
  }
  __syncwarp();
  const auto add = [&](int group) {
#pragma unroll
    for (int e = 0; e < kGroup; e += 2) {
      const float4 scale = scales[(group * kGroup + e) / 2][g];
      const float (&first)[4] = sum[group % 2][e], (&second)[4] = sum[group % 2][e + 1];
      acc[0] = fma1(second[0], scale.z, fma1(first[0], scale.x, acc[0]));
      acc[1] = fma1(second[1], scale.z, fma1(first[1], scale.x, acc[1]));
      acc[2] = fma1(second[2], scale.w, fma1(first[2], scale.y, acc[2]));
      acc[3] = fma1(second[3], scale.w, fma1(first[3], scale.y, acc[3]));
    }
  };
#pragma unroll
  for (int group = 0; group < kSpanBlocks / kGroup; ++group) {
    constexpr int kInPanel = kPanelBlocks / kGroup;
    const int which = group % 2, b = group % kInPanel * kGroup;
    const unsigned char* panel = chunk + min(group / kInPanel, panels - 1) * kPanelBytes;
    const uint4 words = *reinterpret_cast<const uint4*>(panel + panel_code(b, lane));
#pragma unroll
    for (int e = 0; e < kGroup; ++e) {
      uint32_t a[4];
      codes_to_fp16(e == 0 ? words.x : e == 1 ? words.y : e == 2 ? words.z : words.w, a);
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[which][e][j] = 0.0f;
      ptx::mma_fp16(sum[which][e], a, x[group * kGroup + e]);
    }
    if (group > 0) add(group - 1);
  }
  add(kSpanBlocks / kGroup - 1);
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
