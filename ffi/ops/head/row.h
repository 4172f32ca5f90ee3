// Logits and what is read off a row of them (docs/numerics.md 7, Head, argmax, Log-probability).
#pragma once

#include "ffi/numerics/reduce.h"

namespace muse {

// z is the GEMM's fp32 result.
MUSE_FN float softcap_logit(float z, float multiplier, float cap) {
  return canonical(cap * tanh1((z * multiplier) / cap));
}

// The largest of (best, best_index) and n logits whose first has index `first`, ids ascending: lets a row be searched
// in parts. Start with best = NaN, best_index = 0.
MUSE_FN void argmax_continue(const float* logits, int64_t n, int64_t first, float& best, int64_t& best_index) {
  for (int64_t i = 0; i < n; ++i)
    if (logits[i] > best || (is_nan(best) && !is_nan(logits[i]))) {
      best = logits[i];
      best_index = first + i;
    }
}

MUSE_FN int64_t argmax_row(const float* logits, int64_t n) {
  float best = nan32();
  int64_t index = 0;
  argmax_continue(logits, n, 0, best, index);
  return index;
}

// The sum of exp(logit) over one segment of V/8 logits.
MUSE_FN float exp_sum_segment(const float* logits, int64_t n) {
  float lane[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int j = 0; j < kLanes; ++j) lane[j] = lane[j] + exp1(logits[i + j]);
  for (int j = 0; i + j < n; ++j) lane[j] = lane[j] + exp1(logits[i + j]);
  return fold_lanes(lane);
}

// Log-probability of a token with this logit, from the eight segment sums.
MUSE_FN float log_prob_of(float logit, const float* segment_sums) {
  return canonical(logit - log1(tree8(segment_sums)));
}

// n is a multiple of 8; a token outside 0 .. n-1 gives NaN.
MUSE_FN float log_prob_row(const float* logits, int64_t n, int64_t token) {
  if (token < 0 || token >= n) return nan32();
  float sums[kSegments];
  for (int s = 0; s < kSegments; ++s) sums[s] = exp_sum_segment(logits + s * (n / kSegments), n / kSegments);
  return log_prob_of(logits[token], sums);
}

}  // namespace muse
