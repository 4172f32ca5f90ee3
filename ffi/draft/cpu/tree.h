// A tree of the most probable continuations on the CPU; muse_jax/speculative/tree.py's best_first is the definition.
#pragma once

#include "ffi/draft/draft.h"

namespace muse {

// One sequence: candidates [places, K] and their log-probabilities [places, pair rows, K]. Fills the call's results for
// sequence b.
void best_first(const DraftCall& call, int64_t b, const int32_t* ids, const float* log_probs);

}  // namespace muse
