// fsum16, the 16-wide fused sum of a Hopper tensor core (docs/numerics.md 4), bit for bit for every input, in 64-bit
// integers. host_tile.h holds the fast form for operands in an ordinary range; this one is the definition.
#pragma once

#include "formats.h"

namespace muse {

namespace fsum16_detail {

constexpr int kNoExponent = -100000;  // below every term's: there is none yet

struct Term {
  int64_t significand;  // signed; value = significand * 2^(exponent - fraction bits)
  int exponent;
  bool nan, infinite, negative;
};

MUSE_FN Term decode(uint32_t sign, uint32_t exponent, uint32_t fraction, uint32_t exponent_max, int bias, int bits) {
  Term t{};
  t.negative = sign != 0;
  t.nan = exponent == exponent_max && fraction != 0;
  t.infinite = exponent == exponent_max && fraction == 0;
  t.exponent = (exponent == 0 ? 1 : static_cast<int>(exponent)) - bias;
  const int64_t magnitude = exponent == 0 ? fraction : fraction | (1u << bits);
  t.significand = t.negative ? -magnitude : magnitude;
  return t;
}

MUSE_FN Term decode16(uint16_t x, Operand kind) {
  return kind == Operand::kBf16 ? decode(x >> 15, (x >> 7) & 255u, x & 127u, 255, 127, 7)
                                : decode(x >> 15, (x >> 10) & 31u, x & 1023u, 31, 15, 10);
}

MUSE_FN Term decode32(float x) {
  const uint32_t u = bit_cast<uint32_t>(x);
  return decode(u >> 31, (u >> 23) & 255u, u & 0x7FFFFFu, 255, 127, 23);
}

// significand * 2^shift, truncated toward zero to an integer.
MUSE_FN int64_t scale_truncated(int64_t significand, int shift) {
  const int64_t magnitude = significand < 0 ? -significand : significand;
  const int64_t scaled = shift >= 0 ? magnitude << shift : shift > -63 ? magnitude >> -shift : 0;
  return significand < 0 ? -scaled : scaled;
}

// sum * 2^unit as fp32, truncated toward zero; a zero is always +0 (measured on an H200).
MUSE_FN float truncate_to_fp32(int64_t sum, int unit) {
  if (sum == 0) return 0.0f;  // terms of any size may cancel
  uint64_t magnitude = static_cast<uint64_t>(sum < 0 ? -sum : sum);
  const uint32_t sign = sum < 0 ? 0x80000000u : 0u;
  int top = 0;
  for (uint64_t m = magnitude; m > 1; m >>= 1) ++top;
  const int exponent = unit + top;
  if (exponent > 127) return bit_cast<float>(sign | 0x7F800000u);
  const int quantum = exponent - 23 > -149 ? exponent - 23 : -149, shift = unit - quantum;
  magnitude = shift >= 0 ? magnitude << shift : shift > -64 ? magnitude >> -shift : 0;
  if (magnitude == 0) return 0.0f;
  // The hidden bit of a normal number carries into the exponent field; a subnormal has none.
  const uint32_t field = exponent >= -126 ? static_cast<uint32_t>(exponent + 126) : 0u;
  return bit_cast<float>(sign | ((field << 23) + static_cast<uint32_t>(magnitude)));
}

}  // namespace fsum16_detail

// a and b are 16 raw operands, `stride_b` elements apart in b.
MUSE_FN float fsum16(float acc, const uint16_t* a, const uint16_t* b, Operand kind, int64_t stride_b = 1) {
  using namespace fsum16_detail;
  const int product_bits = kind == Operand::kBf16 ? 14 : 20;
  const Term c = decode32(acc);
  bool nan = c.nan, plus = c.infinite && !c.negative, minus = c.infinite && c.negative;
  int largest = c.significand != 0 ? c.exponent : kNoExponent;
  int64_t product[16];
  int exponent[16];
  for (int i = 0; i < 16; ++i) {
    const Term x = decode16(a[i], kind), y = decode16(b[i * stride_b], kind);
    const bool negative = x.negative != y.negative, infinite = x.infinite || y.infinite;
    nan = nan || x.nan || y.nan || (x.infinite && y.significand == 0) || (y.infinite && x.significand == 0);
    plus = plus || (infinite && !negative);
    minus = minus || (infinite && negative);
    product[i] = x.significand * y.significand;
    exponent[i] = x.exponent + y.exponent;
    if (product[i] != 0 && exponent[i] > largest) largest = exponent[i];
  }
  if (nan || (plus && minus)) return bit_cast<float>(kNan32);
  if (plus || minus) return bit_cast<float>(plus ? 0x7F800000u : 0xFF800000u);
  if (largest == kNoExponent) return 0.0f;  // nothing but zeros
  int64_t sum = scale_truncated(c.significand, c.exponent - 23 - (largest - 25));
  for (int i = 0; i < 16; ++i)
    if (product[i] != 0) sum += scale_truncated(product[i], exponent[i] - product_bits - (largest - 25));
  return truncate_to_fp32(sum, largest - 25);
}

}  // namespace muse
