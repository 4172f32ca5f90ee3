// Attention of the fused step on the CPU: cached K and V, trees in flight, sliding windows.
#pragma once

#include <vector>

#include "ffi/decode/cpu/rows.h"

namespace muse {

// q, a: [active rows, q_heads * 64] bf16. The rows' own K and V are in the caches already.
void attend(const StepCall& call, int64_t layer, const std::vector<ActiveRow>& rows, const uint16_t* q, uint16_t* a);

}  // namespace muse
