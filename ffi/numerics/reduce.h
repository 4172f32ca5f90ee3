// Ordered reductions of the contract (docs/numerics.md 2): sixteen lanes inside a segment, a tree over eight segments.
#pragma once

#include "elementary.h"

namespace muse {

constexpr int kSegments = 8;
constexpr int kLanes = 16;

MUSE_FN float tree8(const float* s) { return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7])); }

// Folds the sixteen lane accumulators, neighbours first.
MUSE_FN float fold_lanes(float* lane) {
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int j = 0; j < width; ++j) lane[j] = lane[2 * j] + lane[2 * j + 1];
  return lane[0];
}

// An operand is fp32, or raw bf16 bits, which widen exactly.
MUSE_FN float widen(float x) { return x; }
MUSE_FN float widen(uint16_t bits) { return from_bf16(bits); }

// lanes(x, y) over n elements of one segment (or one head).
template <typename X, typename Y>
MUSE_FN float lanes(int64_t n, const X* x, const Y* y) {
  float lane[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int j = 0; j < kLanes; ++j) lane[j] = fma1(widen(x[i + j]), widen(y[i + j]), lane[j]);
  for (int j = 0; i + j < n; ++j) lane[j] = fma1(widen(x[i + j]), widen(y[i + j]), lane[j]);
  return fold_lanes(lane);
}

// tree8 of lanes over eight segments of n / 8 elements.
template <typename X, typename Y>
MUSE_FN float dot(int64_t n, const X* x, const Y* y) {
  float s[kSegments];
  const int64_t length = n / kSegments;
  for (int r = 0; r < kSegments; ++r) s[r] = lanes(length, x + r * length, y + r * length);
  return tree8(s);
}

template <typename X>
MUSE_FN float sumsq(int64_t n, const X* x) {
  return dot(n, x, x);
}

// r(ss, n, eps): what a row is multiplied by to have mean square 1.
MUSE_FN float inverse_rms(float ss, int64_t n, float eps) { return rsqrt1(ss / static_cast<float>(n) + eps); }

}  // namespace muse
