// The residual gate (docs/numerics.md 7, Residual gate); element-wise, so any range of columns.
#pragma once

#include "ffi/numerics/elementary.h"

namespace muse {

MUSE_FN void gate_coefficient_row(const uint16_t* gate, int64_t n, float temperature, float* alpha, float* beta) {
  for (int64_t i = 0; i < n; ++i) {
    const float z = from_bf16(gate[i]) / temperature, b = sigmoid(z);
    const float kept = sigmoid(-z) * (1.0f + b);
    beta[i] = canonical(b);
    alpha[i] = canonical(sqrt1(kept < 1e-3f ? 1e-3f : kept));  // a NaN stays
  }
}

// out = alpha * s + beta * n; out may be s.
MUSE_FN void residual_row(const float* s, const uint16_t* n, const float* alpha, const float* beta, int64_t count,
                          float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = canonical(alpha[i] * s[i] + beta[i] * from_bf16(n[i]));
}

}  // namespace muse
