// The residual gate (docs/numerics.md 7, Residual gate).
#pragma once

#include "ffi/ops/launch.h"

namespace muse {

Status gate_coefficients(Stream stream, int64_t columns, float temperature, const uint16_t* gate, float* alpha,
                         float* beta);

// out = alpha * s + beta * n for rows of `columns`; out may be s.
Status residual(Stream stream, int64_t rows, int64_t columns, const float* s, const uint16_t* n, const float* alpha,
                const float* beta, float* out);

}  // namespace muse
