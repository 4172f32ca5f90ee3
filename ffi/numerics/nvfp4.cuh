// NVFP4 blocks as tensor-core operands: e2m1(code) * e4m3(scale) is an exact bf16 number (docs/numerics.md 5).
#pragma once

#include "formats.h"

namespace muse {

// Four bytes of a (0 to 3) and b (4 to 7) by the selector's nibbles; a nibble with bit 3 set gives the byte's sign
// eight times (which __byte_perm does not do).
__device__ __forceinline__ uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
}

__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// An e4m3 scale as two equal bf16 numbers; exact, NaN stays NaN.
__device__ __forceinline__ uint32_t scale_bf16x2(uint8_t scale) {
  const uint32_t bits = bit_cast<uint32_t>(from_e4m3(scale));
  return permute_bytes(bits, bits, 0x3232);
}

// Four codes (the low 16 bits, element 0 lowest) as two words of two bf16 numbers each, unscaled.
__device__ __forceinline__ uint2 codes_bf16x4(uint32_t codes) {
  // Four codes are looked up at once: high and low bytes of 0, .5, 1, 1.5 and 2, 3, 4, 6.
  const uint32_t magnitude = codes & 0x7777u;
  const uint32_t high = permute_bytes(0x3F3F3F00u, 0x40404040u, magnitude);
  const uint32_t low = permute_bytes(0xC0800000u, 0xC0804000u, magnitude);
  // 0xFF for a negative code, 0x80 otherwise.
  const uint32_t negative = permute_bytes(0x80808080u, 0x80808080u, codes);
  const uint32_t signed_high = high | ((negative << 7) & 0x80808080u);
  return {permute_bytes(low, signed_high, 0x5140), permute_bytes(low, signed_high, 0x7362)};
}

// Sixteen codes (two per byte, element 2j in byte j's low nibble) times their scale, as sixteen bf16 numbers.
__device__ __forceinline__ void expand_block(uint2 codes, uint8_t scale, uint4 (&out)[2]) {
  const uint32_t s = scale_bf16x2(scale);
  const uint2 a = codes_bf16x4(codes.x & 0xFFFFu), b = codes_bf16x4(codes.x >> 16);
  const uint2 c = codes_bf16x4(codes.y & 0xFFFFu), d = codes_bf16x4(codes.y >> 16);
  out[0] = {multiply_bf16x2(a.x, s), multiply_bf16x2(a.y, s), multiply_bf16x2(b.x, s), multiply_bf16x2(b.y, s)};
  out[1] = {multiply_bf16x2(c.x, s), multiply_bf16x2(c.y, s), multiply_bf16x2(d.x, s), multiply_bf16x2(d.y, s)};
}

}  // namespace muse
