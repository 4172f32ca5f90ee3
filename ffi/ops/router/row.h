// The router's choice for one row (docs/numerics.md 7, MoE 2).
#pragma once

#include "ffi/numerics/reduce.h"

namespace muse {

// Position of each slot when the slots are ordered by ascending expert id: order[0] is the slot of the lowest id.
MUSE_FN void expert_order(const int32_t* experts, int64_t slots, int32_t* order) {
  for (int64_t k = 0; k < slots; ++k) {
    int64_t at = k;
    for (; at > 0 && experts[order[at - 1]] > experts[k]; --at) order[at] = order[at - 1];
    order[at] = static_cast<int32_t>(k);
  }
}

constexpr int64_t kMaxSlots = 64;  // experts per token that one row may choose

// dots[e] = tree8(lanes(h, W_e)) of all experts -> the chosen ids and their weights, largest key first; the logits too
// when asked for. slots <= experts_count, slots <= kMaxSlots.
MUSE_FN void route_row(const float* dots, const float* bias, int64_t experts_count, int64_t slots, float multiplier,
                       float scaling, int32_t* experts, float* weights, float* logits) {
  float keys[kMaxSlots], probability[kMaxSlots];
  int64_t filled = 0;
  for (int64_t first = 0; first < experts_count; first += kLanes) {
    const int count = static_cast<int>(experts_count - first < kLanes ? experts_count - first : kLanes);
    float l[kLanes] = {}, p[kLanes], key[kLanes] = {};
    for (int i = 0; i < count; ++i) l[i] = dots[first + i] * multiplier;
    for (int i = 0; i < kLanes; ++i) p[i] = sigmoid(l[i]);
    for (int i = 0; i < count; ++i) key[i] = p[i] + bias[first + i];
    if (logits)
      for (int i = 0; i < count; ++i) logits[first + i] = canonical(l[i]);
    for (int i = 0; i < count; ++i) {
      // Ids ascend, so an equal key stays behind the one already there, and so does a NaN behind everything.
      int64_t at = filled;
      for (; at > 0 && (key[i] > keys[at - 1] || (is_nan(keys[at - 1]) && !is_nan(key[i]))); --at) {
      }
      if (at == slots) continue;
      filled = filled < slots ? filled + 1 : slots;
      for (int64_t j = filled - 1; j > at; --j) {
        keys[j] = keys[j - 1];
        probability[j] = probability[j - 1];
        experts[j] = experts[j - 1];
      }
      keys[at] = key[i];
      probability[at] = p[i];
      experts[at] = static_cast<int32_t>(first + i);
    }
  }
  int32_t order[kMaxSlots];
  expert_order(experts, slots, order);
  float sum = 0.0f;
  for (int64_t k = 0; k < slots; ++k) sum = sum + probability[order[k]];
  for (int64_t k = 0; k < slots; ++k) weights[k] = canonical(probability[k] / (sum + 1e-15f) * scaling);
}

}  // namespace muse
