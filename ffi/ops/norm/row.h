// One row of the norms of the contract (docs/numerics.md 6); n is a multiple of 128.
#pragma once

#include "ffi/numerics/reduce.h"

namespace muse {

// The gain g = R(1 + w) of a zero-centred weight.
MUSE_FN uint16_t effective_gain(uint16_t w) { return to_bf16(1.0f + from_bf16(w)); }

// out = R((x * r) * g), or R(x * r) without a gain: the second half of a norm, any range of columns. X is float or bf16
// bits; gain holds the effective g as bf16 bits.
template <typename X>
MUSE_FN void scale_row(const X* x, int64_t n, const uint16_t* gain, float r, uint16_t* out) {
  if (gain)
    for (int64_t i = 0; i < n; ++i) out[i] = to_bf16((widen(x[i]) * r) * from_bf16(gain[i]));
  else
    for (int64_t i = 0; i < n; ++i) out[i] = to_bf16(widen(x[i]) * r);
}

// Gained norm, or the one without weight when gain is null.
template <typename X>
MUSE_FN void norm_row(const X* x, int64_t n, const uint16_t* gain, float eps, uint16_t* out) {
  scale_row(x, n, gain, inverse_rms(sumsq(n, x), n, eps), out);
}

// Scale first: z = R(y * g), then the norm of z without weight. out may not overlap y.
MUSE_FN void norm_row_scale_first(const uint16_t* y, int64_t n, const uint16_t* gain, float eps, uint16_t* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = to_bf16(from_bf16(y[i]) * from_bf16(gain[i]));
  const float r = inverse_rms(sumsq(n, out), n, eps);
  for (int64_t i = 0; i < n; ++i) out[i] = to_bf16(from_bf16(out[i]) * r);
}

}  // namespace muse
