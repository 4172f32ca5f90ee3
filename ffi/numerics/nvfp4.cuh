// NVFP4 blocks as tensor-core operands: e2m1(code) * e4m3(scale) is an exact bf16 number (docs/numerics.md 5).
#pragma once

#include "ffi/device/ptx.cuh"
#include "formats.h"

namespace muse {

// An e4m3 scale as two equal bf16 numbers; exact, NaN stays NaN.
__device__ __forceinline__ uint32_t scale_bf16x2(uint8_t scale) {
  const uint32_t bits = bit_cast<uint32_t>(from_e4m3(scale));
  return ptx::prmt(bits, bits, 0x3232);
}

// Four codes (the low 16 bits, element 0 lowest) as two words of two bf16 numbers each, unscaled.
__device__ __forceinline__ uint2 codes_bf16x4(uint32_t codes) {
  // Four codes are looked up at once: high and low bytes of 0, .5, 1, 1.5 and 2, 3, 4, 6.
  const uint32_t magnitude = codes & 0x7777u;
  const uint32_t high = ptx::prmt(0x3F3F3F00u, 0x40404040u, magnitude);
  const uint32_t low = ptx::prmt(0xC0800000u, 0xC0804000u, magnitude);
  // 0xFF for a negative code, 0x80 otherwise.
  const uint32_t negative = ptx::prmt(0x80808080u, 0x80808080u, codes);
  const uint32_t signed_high = high | ((negative << 7) & 0x80808080u);
  return {ptx::prmt(low, signed_high, 0x5140), ptx::prmt(low, signed_high, 0x7362)};
}

// Sixteen codes (two per byte, element 2j in byte j's low nibble) times their scale, as sixteen bf16 numbers.
__device__ __forceinline__ void expand_block(uint2 codes, uint8_t scale, uint4 (&out)[2]) {
  const uint32_t s = scale_bf16x2(scale);
  const uint2 a = codes_bf16x4(codes.x & 0xFFFFu), b = codes_bf16x4(codes.x >> 16);
  const uint2 c = codes_bf16x4(codes.y & 0xFFFFu), d = codes_bf16x4(codes.y >> 16);
  out[0] = {ptx::mul_bf16x2(a.x, s), ptx::mul_bf16x2(a.y, s), ptx::mul_bf16x2(b.x, s), ptx::mul_bf16x2(b.y, s)};
  out[1] = {ptx::mul_bf16x2(c.x, s), ptx::mul_bf16x2(c.y, s), ptx::mul_bf16x2(d.x, s), ptx::mul_bf16x2(d.y, s)};
}

}  // namespace muse
