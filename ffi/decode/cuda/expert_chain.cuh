// One warp's chain over a K segment of an expert's 16 rows: weights from the ring are the A operand, at most eight
// tokens' rows the B operand, held in registers because a warp uses them for many row groups.
#pragma once

#include "ffi/decode/cuda/ring.cuh"
#include "ffi/decode/cuda/schedule.h"
#include "ffi/numerics/mma.cuh"

namespace muse {

constexpr int kSpanBlocks = 32;  // 16-blocks of K whose B operand a warp holds: 64 registers

enum class ExpertKind { kBf16, kW4A16, kW4A4 };

using TokenOperand = uint32_t[kSpanBlocks][2];

// The lane's registers of the blocks from `row` (column g's) on; blocks past `count` become zeros. t = lane % 4.
__device__ __forceinline__ void load_tokens(const uint16_t* row, int count, int t, TokenOperand& x) {
  const uint4* from = reinterpret_cast<const uint4*>(row) + t;
#pragma unroll
  for (int b = 0; b < kSpanBlocks; b += 2) {
    const uint4 two = b < count ? __ldcg(from + b * 2) : uint4{0, 0, 0, 0};
    x[b][0] = two.x, x[b][1] = two.y, x[b + 1][0] = two.z, x[b + 1][1] = two.w;
  }
}

// Eight scales of the lane's two rows from a panel, by block.
struct PanelScales {
  uint32_t word[4];
  __device__ __forceinline__ float2 of(int block) const {
    const uint16_t two = static_cast<uint16_t>(word[block / 2] >> (16 * (block % 2)));
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(two));
    float low, high;
    asm("{ .reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
        : "=f"(low), "=f"(high)
        : "r"(halves));
    return {low, high};
  }
};

__device__ __forceinline__ PanelScales panel_scales(const unsigned char* panel, int lane) {
  const uint4 v = *reinterpret_cast<const uint4*>(panel + panel_scale(0, lane / 4));
  return {{v.x, v.y, v.z, v.w}};
}

// Codes become fp16 numbers code * 2^-14 by shift and mask (layout.h); the shifts are products, which run in another
// pipe than the masks. Sums are 2^-14 of what they mean until the last one (kCodeScale).
constexpr float kCodeScale = 0x1p14f;

__device__ __forceinline__ void codes_to_fp16(uint32_t word, uint32_t (&a)[4]) {
  a[0] = word & 0x8E008E00u;
  a[1] = (word * 8u) & 0x8E008E00u;
  a[2] = ((word * 64u) & 0x0E000E00u) | ((word * 2u) & 0x80008000u);
  a[3] = ((word * 512u) & 0x0E000E00u) | ((word * 4u) & 0x80008000u);
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

// acc += the chain over a chunk's panels, whose first block is x[0].
template <ExpertKind kKind>
__device__ __forceinline__ void chain_panels(const unsigned char* chunk, int panels, int lane, const TokenOperand& x,
                                             float (&acc)[4]) {
#pragma unroll
  for (int p = 0; p < kSlotBytes / kPanelBytes; ++p) {
    if (p >= panels) break;
    const unsigned char* panel = chunk + p * kPanelBytes;
    const PanelScales scales = panel_scales(panel, lane);
#pragma unroll
    for (int b = 0; b < kPanelBlocks; b += 4) {
      const uint4 words = *reinterpret_cast<const uint4*>(panel + panel_code(b, lane));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t word = e == 0 ? words.x : e == 1 ? words.y : e == 2 ? words.z : words.w;
        const float2 scale = scales.of(b + e);
        uint32_t a[4];
        if (kKind == ExpertKind::kW4A4) {
          // The block's exact sum from a zero accumulator; the token operand carries its own block scale.
          codes_to_fp16(word, a);
          float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
          mma_fp16(sum, a, x[p * kPanelBlocks + b + e]);
          acc[0] = fma1(sum[0], scale.x, acc[0]);
          acc[1] = fma1(sum[1], scale.x, acc[1]);
          acc[2] = fma1(sum[2], scale.y, acc[2]);
          acc[3] = fma1(sum[3], scale.y, acc[3]);
        } else {
          codes_to_bf16(word, scale, a);
          mma_bf16(acc, a, x[p * kPanelBlocks + b + e]);
        }
      }
    }
  }
}

// The same over bf16 tiles, whose first block is x[kFirst].
template <int kFirst>
__device__ __forceinline__ void chain_expert_tiles(const unsigned char* chunk, int tiles, int lane,
                                                   const TokenOperand& x, float (&acc)[4]) {
#pragma unroll
  for (int b = 0; b < kSlotTiles; ++b) {
    if (b >= tiles) break;
    const uint4 w = reinterpret_cast<const uint4*>(chunk)[b * 32 + lane];
    const uint32_t a[4] = {w.x, w.y, w.z, w.w};
    mma_bf16(acc, a, x[kFirst + b]);
  }
}

}  // namespace muse
