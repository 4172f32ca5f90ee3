// Routed experts (docs/numerics.md 7, MoE 4): f = down(silu(gate x) * up x) per (token, slot).
#pragma once

#include "ffi/ops/gemm/gemm.h"

namespace muse {

// x [tokens, model], experts [tokens, slots] (global ids); the weights are those of the `local` experts from `first`
// on. f [tokens, slots, model] is zero where the expert is elsewhere.
struct ExpertFfn {
  int64_t tokens, slots, model, intermediate, local;
};

// w13 [local, 2 * intermediate, model], gate rows first; w2 [local, model, intermediate].
Status expert_ffn(Stream stream, Scratch* scratch, ExpertFfn op, const uint16_t* x, const int32_t* experts,
                  const int32_t* first, const uint16_t* w13, const uint16_t* w2, uint16_t* f);

struct Nvfp4Experts {
  Nvfp4 w13, w2;
  const float* w13_scale_2;   // [local, 2]
  const float* w2_scale_2;    // [local]
  const float* input_scales;  // [2], used when activations are quantised
  bool quantize_activations;  // W4A4, otherwise W4A16
};

Status expert_ffn_nvfp4(Stream stream, Scratch* scratch, ExpertFfn op, const uint16_t* x, const int32_t* experts,
                        const int32_t* first, Nvfp4Experts weights, uint16_t* f);

}  // namespace muse
