// One head of q or k: norm, rotation, and the cache's poison rule (docs/numerics.md 7, Attention 3 and 4).
#pragma once

#include "ffi/numerics/reduce.h"

namespace muse {

constexpr int kHead = 64;

// R(x * r64), then on RoPE layers adjacent pairs rotated; cos and sin hold 32 numbers each, null for no rotation. out
// may be x.
MUSE_FN void norm_rope_head(const uint16_t* x, const float* cos, const float* sin, float eps, uint16_t* out) {
  const float r = inverse_rms(lanes(kHead, x, x), kHead, eps);
  float y[kHead];
  for (int i = 0; i < kHead; ++i) y[i] = round_bf16(from_bf16(x[i]) * r);
  if (!cos) {
    for (int i = 0; i < kHead; ++i) out[i] = to_bf16(y[i]);
    return;
  }
  for (int i = 0; i < kHead / 2; ++i) {
    const float a = y[2 * i], b = y[2 * i + 1];
    out[2 * i] = to_bf16(a * cos[i] - b * sin[i]);
    out[2 * i + 1] = to_bf16(a * sin[i] + b * cos[i]);
  }
}

// Makes one position's k and v what the cache stores: a NaN or infinity in either becomes k = NaNs, v = zeros.
MUSE_FN void canonical_kv(uint16_t* k, uint16_t* v) {
  bool finite = true;
  for (int i = 0; i < kHead; ++i) finite = finite & bf16_finite(k[i]) & bf16_finite(v[i]);
  if (finite) return;
  for (int i = 0; i < kHead; ++i) {
    k[i] = kNan16;
    v[i] = 0;
  }
}

}  // namespace muse
