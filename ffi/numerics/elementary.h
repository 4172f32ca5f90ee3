// Elementary functions of the contract (docs/numerics.md 3): IEEE operations and written-out fma only, so that host and
// device agree to the last bit.
#pragma once

#include "formats.h"

namespace muse {

MUSE_FN float bits32(uint32_t u) { return bit_cast<float>(u); }
MUSE_FN float power_of_two(int n) { return bits32(static_cast<uint32_t>(n + 127) << 23); }

// exp(c) = y 2^n with n = shifted - kShift, whose low bits are n.
constexpr float kShift = 12582912.0f;  // 1.5 * 2^23
struct ExpParts {
  float y, shifted;
};
MUSE_FN ExpParts exp_parts(float c) {
  const float shifted = fma1(c, bits32(0x3FB8AA3Bu), kShift), n = shifted - kShift;  // n = round(c / ln 2)
  float r = fma1(n, -0.693359375f, c);  // ln 2 in two parts, the first exact times any |n| < 2^13
  r = fma1(n, bits32(0x395E8083u), r);
  float p = bits32(0x3950DAE6u);
  p = fma1(p, r, bits32(0x3AB6CBA6u));
  p = fma1(p, r, bits32(0x3C08883Fu));
  p = fma1(p, r, bits32(0x3D2AAA40u));
  p = fma1(p, r, bits32(0x3E2AAAABu));
  p = fma1(p, r, bits32(0x3F000000u));
  return {fma1(p, r * r, r) + 1.0f, shifted};
}

MUSE_FN float exp1(float x) {
  // Outside the range the polynomial still runs on a clamped argument, so that loops over this function vectorise.
  const float kHigh = bits32(0x42B17217u), kLow = -104.0f;
  const ExpParts e = exp_parts(x > kHigh ? kHigh : (x >= kLow ? x : kLow));
  // Two factors, because 2^n alone leaves the normal range at both ends; the first product is exact.
  const int k = static_cast<int>(e.shifted - kShift), k1 = k >> 1, k2 = k - k1;
  const float result = (e.y * power_of_two(k1)) * power_of_two(k2);
  return is_nan(x) ? nan32() : x > kHigh ? inf32() : x < kLow ? 0.0f : result;
}

// exp1(x) where |x| < kUsualExp, in fewer steps: the result is normal, so n is added to the exponent. (All 2.2 billion
// such floats were compared.)
constexpr float kUsualExp = 80.0f;
MUSE_FN float usual_exp1(float x) {
  const ExpParts e = exp_parts(x);
  return bits32(bit_cast<uint32_t>(e.y) + (bit_cast<uint32_t>(e.shifted) << 23));
}

MUSE_FN float sigmoid(float x) { return 1.0f / (1.0f + exp1(-x)); }
MUSE_FN float silu(float x) { return x / (1.0f + exp1(-x)); }
MUSE_FN float rsqrt1(float x) { return 1.0f / sqrt1(x); }

MUSE_FN float tanh1(float x) {
  const float a = abs32(x);
  float y;
  if (a < 0.625f) {
    const float z = a * a;
    float p = bits32(0xBBBB55FBu);
    p = fma1(p, z, bits32(0x3CA92B67u));
    p = fma1(p, z, bits32(0xBD5C2224u));
    p = fma1(p, z, bits32(0x3E0883B4u));
    p = fma1(p, z, bits32(0xBEAAAA9Au));
    y = fma1(a * z, p, a);
  } else {
    y = 1.0f - 2.0f / (exp1(2.0f * a) + 1.0f);
  }
  return is_nan(x) ? nan32() : bits32(bit_cast<uint32_t>(y) | (bit_cast<uint32_t>(x) & 0x80000000u));
}

MUSE_FN float log1(float x) {
  if (is_nan(x) || x < 0.0f) return nan32();
  if (x == 0.0f) return -inf32();
  if (x == inf32()) return x;
  int e = 0;
  if (x < 0x1p-126f) {
    x = x * 0x1p24f;
    e = -24;
  }
  const uint32_t u = bit_cast<uint32_t>(x);
  e += static_cast<int>(u >> 23) - 127;
  float m = bits32((u & 0x7FFFFFu) | 0x3F800000u);
  if (m >= bits32(0x3FB504F3u)) {
    m = m * 0.5f;
    e += 1;
  }
  const float s = (m - 1.0f) / (m + 1.0f), z = s * s;
  float p = bits32(0x3E7182A1u);
  p = fma1(p, z, bits32(0x3E921C3Du));
  p = fma1(p, z, bits32(0x3ECCCD3Eu));
  p = fma1(p, z, bits32(0x3F2AAAAAu));
  const float w = fma1(s * z, p, 2.0f * s), k = static_cast<float>(e);
  return fma1(k, 0.693359375f, fma1(k, bits32(0xB95E8083u), w));
}

}  // namespace muse
