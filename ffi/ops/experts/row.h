// One element of the experts' activation (docs/numerics.md 7, MoE 4).
#pragma once

#include "ffi/numerics/elementary.h"

namespace muse {

// m = R(silu(gate) * up), element by element.
MUSE_FN void swiglu_row(const float* gate, const float* up, int64_t n, uint16_t* m) {
  for (int64_t i = 0; i < n; ++i) m[i] = to_bf16(silu(gate[i]) * up[i]);
}

}  // namespace muse
