// Logits and log-probabilities (docs/numerics.md 7, Head and Log-probability).
#pragma once

#include "ffi/ops/launch.h"

namespace muse {

struct Head {
  int64_t rows, vocabulary, hidden;
  float multiplier, cap;
};

// h bf16 [rows, hidden] (normed), w bf16 [vocabulary, hidden] -> logits fp32 [rows, vocabulary].
Status head(Stream stream, Head op, const uint16_t* h, const uint16_t* w, float* logits);

// vocabulary % 8 == 0; a token outside it gives NaN.
Status log_prob(Stream stream, int64_t rows, int64_t vocabulary, const float* logits, const int32_t* token,
                float* result);

}  // namespace muse
