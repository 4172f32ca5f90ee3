// Router of whole rows (docs/numerics.md 7, MoE 2).
#pragma once

#include "ffi/ops/launch.h"

namespace muse {

struct Router {
  int64_t rows, hidden, experts, slots;
  float multiplier, scaling;
};

// h bf16 [rows, hidden], w fp32 [experts, hidden] -> ids and weights [rows, slots], logits [rows, experts].
Status router(Stream stream, Router op, const uint16_t* h, const float* w, const float* bias, int32_t* experts,
              float* weights, float* logits);

constexpr int64_t kRouterMaxSlots = 64;

}  // namespace muse
