// The fused decode step: what a call hands to the kernels. Plain pointers, one table per rank; a GPU sees its peers'
// memory as the CPU sees the other devices' buffers.
#pragma once

#include <vector>

#include "ffi/decode/plan.h"
#include "ffi/ops/launch.h"

namespace muse {

// One rank's share of the weights and caches (docs/architecture.md, "DecodeWeights").
struct RankPointers {
  const uint16_t *embed, *qkvu, *o, *pre_expert, *post_expert, *w13_bf16, *w2_bf16;
  const uint8_t *w13_fp4, *w2_fp4;
  const float* router;
  uint16_t *k_full, *v_full, *k_ring, *v_ring;
};

// Replicated operands; every device holds equal copies, any one serves.
struct SharedPointers {
  const int32_t *token, *sequence, *position, *lengths;
  const bool* ancestors;  // [rows, rows]
  const float *stream, *rope, *gates, *router_bias, *scale_2, *input_scales;
  const uint16_t *hidden_gains, *moe_gains;  // [L, 3, H], [L, 2, M]
};

// Results of one device. The three taps are all null when not asked for.
struct StepResults {
  float* stream;         // [rows, H]
  float* tap_residuals;  // [layers run, 2, rows, H]: after attention, after the MoE
  int32_t* tap_experts;  // [layers run, rows, K]
  float* tap_weights;    // [layers run, rows, K]
};

struct StepCall {
  Plan plan;
  RankPointers rank[kRanks];
  SharedPointers shared;
  std::vector<StepResults> results;  // one per device
};

// Runs layers [layer_begin, layer_end); layer_begin = 0 embeds the tokens first. Errors: a token, sequence or position
// out of range, capacity exceeded, ancestors that are not a path.
Status decode_layers_cpu(const StepCall& call);

struct HeadResults {
  int32_t* token;  // [rows]: greedy choice, -1 for an inactive row
  bool* nan;       // [rows]: the row's logits hold a NaN
};

struct HeadCall {
  int64_t rows, hidden, vocab;
  float eps, multiplier, cap;
  const float* stream;      // [rows, H]
  const uint16_t* gain;     // [H]
  const int32_t* sequence;  // [rows]
  const uint16_t* lm_head[kRanks];
  float* logits[kRanks];  // each [rows, V/8]
  std::vector<HeadResults> results;
};

Status decode_head_cpu(const HeadCall& call);

}  // namespace muse
