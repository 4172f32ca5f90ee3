// RMS norms of whole rows (docs/numerics.md 6).
#pragma once

#include "ffi/ops/launch.h"

namespace muse {

struct RmsNorm {
  int64_t rows, columns;
  float eps;
  bool fp32_input;   // x is fp32, otherwise bf16 bits
  bool scale_first;  // gain before the norm (x is bf16); otherwise after it
  bool round_input;  // an fp32 x is first rounded to bf16
  bool centred;      // the gain is R(1 + w)
};

// gain is null for a norm without weight.
Status rms_norm(Stream stream, RmsNorm op, const void* x, const uint16_t* gain, uint16_t* y);

}  // namespace muse
