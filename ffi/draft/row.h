// Elements and rows of a draft (docs/numerics.md 11), one code for host and device.
#pragma once

#include "ffi/numerics/reduce.h"
#include "ffi/numerics/rope.h"
#include "ffi/ops/head/row.h"

namespace muse {

// A norm with plain weight: rounded before and after the weight.
MUSE_FN uint16_t draft_norm(uint16_t x, float r, uint16_t weight) {
  return to_bf16(round_bf16(from_bf16(x) * r) * from_bf16(weight));
}

// Two taps: the row itself and the row before it (zero before the first), each with a base and a coefficient.
MUSE_FN uint16_t draft_convolve(uint16_t own_base, uint16_t own_coefficient, uint16_t z, uint16_t last_base,
                                uint16_t last_coefficient, uint16_t last) {
  const float own = from_bf16(own_base) + from_bf16(own_coefficient);
  const float before = from_bf16(last_base) + from_bf16(last_coefficient);
  return to_bf16(own * from_bf16(z) + before * from_bf16(last));
}

MUSE_FN uint16_t draft_add(uint16_t x, uint16_t branch) { return to_bf16(from_bf16(x) + from_bf16(branch)); }

MUSE_FN uint16_t draft_swiglu(uint16_t gate, uint16_t up) { return to_bf16(silu(from_bf16(gate)) * from_bf16(up)); }

// Elements i and i + d/2 of a normalised head.
MUSE_FN void draft_rotate(float cosine, float sine, uint16_t* low, uint16_t* high) {
  const float a = from_bf16(*low), b = from_bf16(*high);
  *low = to_bf16(a * cosine - b * sine);
  *high = to_bf16(a * sine + b * cosine);
}

// What a ring holds: no NaN and no infinity, which would spoil every draft for a window's length.
MUSE_FN uint16_t draft_finite(uint16_t x) { return bf16_finite(x) ? x : uint16_t{0}; }

// A logit as the target transforms it; NaN is the least.
MUSE_FN float draft_logit(float z, float multiplier, float cap) {
  const float logit = softcap_logit(z, multiplier, cap);
  return is_nan(logit) ? -cap : logit;
}

// Of two numbers the larger, NaN being none.
MUSE_FN float larger(float a, float b) { return b > a || is_nan(a) ? b : a; }

// Order of candidates: larger first, then the lower id; NaN counts as -infinity, -0 as 0. Keys are never equal.
MUSE_FN uint64_t candidate_key(float z, int64_t id) {
  const float x = is_nan(z) ? -inf32() : z == 0.0f ? 0.0f : z;
  const uint32_t u = bit_cast<uint32_t>(x), ordered = u & 0x80000000u ? ~u : u | 0x80000000u;
  return static_cast<uint64_t>(ordered) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(id));
}
MUSE_FN int32_t candidate_id(uint64_t key) { return static_cast<int32_t>(0xFFFFFFFFu - static_cast<uint32_t>(key)); }

// Log-probability of an edge as the tree takes it.
MUSE_FN float draft_edge(float log_prob) { return is_nan(log_prob) ? -inf32() : log_prob > 0.0f ? 0.0f : log_prob; }

// What may become a tree's next node: the rank-th child of `parent`. The larger score comes first, then the lower
// depth, parent and rank, which are packed in that order.
struct DraftEntry {
  float score;
  uint32_t order;
};
MUSE_FN uint32_t draft_order(int depth, int parent, int rank) {
  return static_cast<uint32_t>(depth) << 16 | static_cast<uint32_t>(parent) << 8 | static_cast<uint32_t>(rank);
}
MUSE_FN bool comes_before(const DraftEntry& a, const DraftEntry& b) {
  return a.score > b.score || (a.score == b.score && a.order < b.order);
}

}  // namespace muse
