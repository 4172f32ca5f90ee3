// A whole draft in one call (docs/numerics.md 11): what a call hands to the kernels. Weights are as published,
// row-major bf16; docs/architecture.md says how they are streamed.
#pragma once

#include "ffi/draft/plan.h"
#include "ffi/ops/launch.h"

namespace muse {

// One convolution: base [2 sides, 2 taps, H] and the projection of its coefficients; null for DFlash.
struct DraftConvolution {
  const uint16_t *base, *projection;
};

struct DraftLayer {
  const uint16_t *input_norm, *post_norm, *q, *k, *v, *o, *q_norm, *k_norm, *gate, *up, *down;
  DraftConvolution attention, mlp;
  // The context ring, [B, slots, kv heads, head_dim] and [B, slots]: updated in place.
  uint16_t *ring_k, *ring_v;
  int32_t* ring_position;
};

struct DraftCall {
  DraftPlan plan;
  // Tokens to be added to the context: features [B, T, taps H], how many of the T, and the first one's position.
  const uint16_t* features;
  const int32_t *count, *first;
  // The newest tokens, roots of the trees, and their positions, [B]; only where plan.width > 0.
  const int32_t *token, *lengths;
  const float* frequencies;  // [head_dim / 2]
  const uint16_t *embedding, *head, *mask, *fc, *hidden_norm, *norm;
  const uint16_t *selector, *predecessor, *successor;  // null for DFlash
  DraftLayer layer[kMaxDraftLayers];
  // The trees, [B, width]; ancestors [B, width, width].
  int32_t *tree_token, *tree_parent, *tree_depth;
  bool* tree_ancestors;
  unsigned char* workspace;  // of draft_workspace(plan).bytes, on GPUs
};

// Adds the tokens to the context and, where plan.width > 0, proposes the trees.
Status draft(Stream stream, const DraftCall& call);

}  // namespace muse
