// The experts of one layer of the fused step on the CPU, N-sharded: every rank holds an eighth of the output rows of
// each GEMM of every expert.
#pragma once

#include <vector>

#include "ffi/decode/step.h"

namespace muse {

// x: normed pooled rows [rows, M] bf16; experts: [rows, K]; f: [rows, K, M] bf16 expert outputs.
void run_experts(const StepCall& call, int64_t layer, int64_t rows, const uint16_t* x, const int32_t* experts,
                 uint16_t* f);

}  // namespace muse
