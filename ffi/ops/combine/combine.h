// Weighted sum of the chosen experts' outputs (docs/numerics.md 7, MoE 5).
#pragma once

#include "ffi/ops/launch.h"

namespace muse {

struct Combine {
  int64_t rows, slots, columns;
  float eps;
};

// f [rows, slots, columns]; gain w [columns] of the zero-centred post_expert_norm -> x [rows, columns].
Status combine(Stream stream, Combine op, const uint16_t* f, const float* weights, const int32_t* experts,
               const uint16_t* gain, uint16_t* x);

}  // namespace muse
