// Number formats of the contract (docs/numerics.md 1 and 8): bf16, fp16, e4m3, e2m1, canonical NaNs.
#pragma once

#include "portability.h"

namespace muse {

constexpr uint32_t kNan32 = 0x7FFFFFFFu;
constexpr uint16_t kNan16 = 0x7FFFu;
constexpr uint8_t kNan8 = 0x7Fu;

// What a tensor core multiplies.
enum class Operand { kBf16, kFp16 };

MUSE_FN bool is_nan(float x) { return x != x; }
MUSE_FN float nan32() { return bit_cast<float>(kNan32); }
MUSE_FN float inf32() { return bit_cast<float>(0x7F800000u); }
MUSE_FN float abs32(float x) { return bit_cast<float>(bit_cast<uint32_t>(x) & 0x7FFFFFFFu); }

// Applied to every fp32 value that an op stores.
MUSE_FN float canonical(float x) { return is_nan(x) ? nan32() : x; }

MUSE_FN float from_bf16(uint16_t bits) { return bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// R(x).
MUSE_FN uint16_t to_bf16(float x) {
#if defined(__CUDA_ARCH__)
  uint16_t bits;  // one instruction with the same result, canonical NaN included
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
#endif
  const uint32_t u = bit_cast<uint32_t>(x);
  return is_nan(x) ? kNan16 : static_cast<uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

MUSE_FN float round_bf16(float x) { return from_bf16(to_bf16(x)); }

MUSE_FN bool bf16_finite(uint16_t bits) { return (bits & 0x7F80u) != 0x7F80u; }

MUSE_FN float from_fp16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 31u, fraction = bits & 1023u;
  if (exponent == 31) return bit_cast<float>(sign | 0x7F800000u | (fraction << 13));
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return bit_cast<float>(sign | bit_cast<uint32_t>(magnitude));
  }
  return bit_cast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
}

MUSE_FN float from_e4m3(uint8_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x80u) << 24;
  const uint32_t exponent = (bits >> 3) & 15u, fraction = bits & 7u;
  if ((bits & 0x7Fu) == 0x7Fu) return nan32();
  if (exponent == 0) return bit_cast<float>(sign | bit_cast<uint32_t>(static_cast<float>(fraction) * 0x1p-9f));
  return bit_cast<float>(sign | ((exponent + 120) << 23) | (fraction << 20));
}

// x >= 0 or NaN; nearest even, saturating at 448 (0x7E).
MUSE_FN uint8_t to_e4m3_sat(float x) {
  if (is_nan(x)) return kNan8;
  if (x >= 448.0f) return 0x7E;
  if (x < 0x1p-6f) {
    // Subnormals are multiples of 2^-9: adding 1.5 * 2^14 makes fp32 round there, nearest even.
    const float shifted = x + 0x1.8p14f;
    return static_cast<uint8_t>(bit_cast<uint32_t>(shifted) & 0xFFu);
  }
  uint32_t u = bit_cast<uint32_t>(x);
  u += 0x7FFFFu + ((u >> 20) & 1u);
  return static_cast<uint8_t>((u >> 20) - (120u << 3));
}

MUSE_FN float from_e2m1(uint32_t code) {
  // Magnitude bits eem: 0, .5 and from 1 on an ordinary fp32 with exponent ee+126 and one fraction bit.
  const uint32_t magnitude = code & 7u, sign = (code & 8u) << 28;
  const uint32_t bits =
      magnitude < 2 ? magnitude * 0x3F000000u : ((magnitude >> 1) + 126u) << 23 | (magnitude & 1u) << 22;
  return bit_cast<float>(sign | bits);
}

MUSE_FN uint32_t to_e2m1_sat(float y) {
  const float a = abs32(y);
  const uint32_t magnitude = static_cast<uint32_t>(a > 0.25f) + static_cast<uint32_t>(a >= 0.75f) +
                             static_cast<uint32_t>(a > 1.25f) + static_cast<uint32_t>(a >= 1.75f) +
                             static_cast<uint32_t>(a > 2.5f) + static_cast<uint32_t>(a >= 3.5f) +
                             static_cast<uint32_t>(a > 5.0f);
  return magnitude | (y < 0.0f ? 8u : 0u);
}

// The scale of a block of activations whose largest magnitude is amax; NaN where not all are finite.
MUSE_FN uint8_t activation_scale(float amax, bool finite, float input_scale) {
  return finite ? to_e4m3_sat((amax / 6.0f) / input_scale) : kNan8;
}

// Activation quantiser of one block of 16 bf16 values; returns the scale's bits and fills 16 codes.
MUSE_FN uint8_t quantize_block(const uint16_t* x, float input_scale, uint8_t* codes) {
  float amax = 0.0f;
  bool finite = true;
  for (int i = 0; i < 16; ++i) {
    const float a = abs32(from_bf16(x[i]));
    amax = a > amax ? a : amax;
    finite = finite && bf16_finite(x[i]);
  }
  const uint8_t sf = activation_scale(amax, finite, input_scale);
  const bool zero = sf == 0 || sf == kNan8;
  const float divisor = from_e4m3(sf) * input_scale;
  for (int i = 0; i < 16; ++i) codes[i] = zero ? 0 : static_cast<uint8_t>(to_e2m1_sat(from_bf16(x[i]) / divisor));
  return sf;
}

// ModelOpt's weight quantiser of one block; weight_scale_2 = amax(tensor) / 2688, weights finite.
MUSE_FN uint8_t quantize_weight_block(const uint16_t* w, float weight_scale_2, uint8_t* codes) {
  float amax = 0.0f;
  for (int i = 0; i < 16; ++i) {
    const float a = abs32(from_bf16(w[i]));
    amax = a > amax ? a : amax;
  }
  float t = amax / (6.0f * weight_scale_2);
  t = t == 0.0f ? 1.0f : t;
  t = t < 0x1p-9f ? 0x1p-9f : t;
  const uint8_t sf = to_e4m3_sat(t);
  const float divisor = from_e4m3(sf) * weight_scale_2;
  for (int i = 0; i < 16; ++i) codes[i] = static_cast<uint8_t>(to_e2m1_sat(from_bf16(w[i]) / divisor));
  return sf;
}

}  // namespace muse
