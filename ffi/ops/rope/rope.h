// Norm and rotation of the heads of q and k, and the cached form of k and v (docs/numerics.md 7, Attention 3 and 4).
#pragma once

#include "ffi/ops/launch.h"

namespace muse {

struct NormRope {
  int64_t rows, heads;
  float eps;
  bool rotate;
};

// x, y [rows, heads, 64]; table [rows, 64]: 32 cosines, then 32 sines (unused without rotation).
Status q_norm_rope(Stream stream, NormRope op, const uint16_t* x, const float* table, uint16_t* y);
Status kv_norm_rope(Stream stream, NormRope op, const uint16_t* k, const uint16_t* v, const float* table,
                    uint16_t* k_cached, uint16_t* v_cached);

}  // namespace muse
