// Every dimension, budget and offset of the fused step, in one struct that host and device share. All pointer
// arithmetic into weights and caches is here; kernels ask it and compute nothing of the kind themselves.
#pragma once

#include <cstdint>
#include <string>

#include "ffi/comm/ranks.h"
#include "ffi/decode/layout.h"
#include "ffi/numerics/reduce.h"

namespace muse {

constexpr int kHeadDim = 64;
constexpr int kMaxRows = 64;     // a row's ancestors fit one 64-bit word; the ring cache keeps 63 slots for them
constexpr int kMaxLayers = 128;  // keeps the plan a plain struct that can be a kernel argument; the release has 62
constexpr int kMaxTopK = 16;

struct LayerKind {
  bool full, rope, nvfp4;
  int16_t cache;    // index among the full or among the sliding layers
  int16_t experts;  // index among the NVFP4 or among the bf16 layers
};

struct Plan {
  // the model
  int64_t layers, hidden, q_heads, kv_heads, moe_hidden, moe_inner, experts, top_k, vocab, window;
  float eps, post_eps, score_scale, router_multiplier, routed_scaling;
  bool quantize_activations;
  LayerKind kind[kMaxLayers];
  // the step
  int64_t rows, sequences, capacity, ring, layer_begin, layer_end;

  // per rank
  MUSE_FN int64_t q_columns() const { return q_heads / kRanks * kHeadDim; }
  MUSE_FN int64_t kv_rank() const { return kv_heads / kRanks; }
  MUSE_FN int64_t kv_columns() const { return kv_rank() * kHeadDim; }
  MUSE_FN int64_t qkvu_rows() const { return 2 * q_columns() + 2 * kv_columns(); }
  MUSE_FN int64_t moe_columns() const { return moe_hidden / kRanks; }
  MUSE_FN int64_t inner_columns() const { return moe_inner / kRanks; }
  MUSE_FN int64_t vocab_rank() const { return vocab / kRanks; }
  MUSE_FN int64_t head_groups() const { return (vocab_rank() + 15) / 16; }
  MUSE_FN int64_t experts_rank() const { return experts / kRanks; }

  // Offsets of layer `l` inside a rank's share of a stacked weight, in elements of that array.
  MUSE_FN int64_t qkvu(int64_t l) const { return l * qkvu_rows() * hidden; }
  MUSE_FN int64_t o(int64_t l) const { return l * hidden * q_columns(); }
  MUSE_FN int64_t router(int64_t l) const { return l * experts_rank() * hidden; }
  MUSE_FN int64_t pre_expert(int64_t l) const { return l * moe_columns() * hidden; }
  MUSE_FN int64_t post_expert(int64_t l) const { return l * hidden * moe_columns(); }
  // Tile index of expert e in the stacked bf16 expert arrays (multiply by the tile's size).
  MUSE_FN int64_t w13_tile(int64_t l, int64_t e) const {
    return (kind[l].experts * experts + e) * (2 * inner_columns() / 16) * (moe_hidden / 16);
  }
  MUSE_FN int64_t w2_tile(int64_t l, int64_t e) const {
    return (kind[l].experts * experts + e) * (moe_columns() / 16) * (moe_inner / 16);
  }
  // NVFP4 panels per segment of a GEMM over k; segments and then 16-row groups follow each other.
  static MUSE_FN int64_t panels(int64_t k) { return (k / kSegments / 16 + kPanelBlocks - 1) / kPanelBlocks; }
  static MUSE_FN int64_t fp4_group(int64_t k) { return kSegments * panels(k) * kPanelBytes; }
  // Byte offset of a 16-row group of expert e in the stacked NVFP4 arrays; w13 alternates gate and up groups.
  MUSE_FN int64_t w13_fp4(int64_t l, int64_t e, int64_t group) const {
    return ((kind[l].experts * experts + e) * (2 * inner_columns() / 16) + group) * fp4_group(moe_hidden);
  }
  MUSE_FN int64_t w2_fp4(int64_t l, int64_t e, int64_t group) const {
    return ((kind[l].experts * experts + e) * (moe_columns() / 16) + group) * fp4_group(moe_inner);
  }

  // KV caches: [layer of its kind, sequence, kv head of the rank, slot, 64].
  MUSE_FN int64_t slots(int64_t l) const { return kind[l].full ? capacity : ring; }
  MUSE_FN int64_t slot(int64_t l, int64_t position) const { return kind[l].full ? position : position % ring; }
  MUSE_FN int64_t cache(int64_t l, int64_t sequence, int64_t head, int64_t slot_index) const {
    return (((kind[l].cache * sequences + sequence) * kv_rank() + head) * slots(l) + slot_index) * kHeadDim;
  }
  // First position that a query at `position` sees in layer l.
  MUSE_FN int64_t first_visible(int64_t l, int64_t position) const {
    return kind[l].full || position < window ? 0 : position - window + 1;
  }

  // The ring keeps every position that 64 rows in flight may still see (window - 1 before the first of them).
  static MUSE_FN int64_t ring_slots(int64_t window) { return (window + kMaxRows - 1 + 15) / 16 * 16; }
};

// Empty when the plan can run; otherwise what is wrong, for the caller's error.
inline std::string check_plan(const Plan& p) {
  const auto multiple = [](const char* name, int64_t value, int64_t of) {
    return value > 0 && value % of == 0 ? std::string()
                                        : std::string(name) + " is " + std::to_string(value) +
                                              ", expected a positive multiple of " + std::to_string(of);
  };
  for (const std::string& problem :
       {multiple("hidden_size", p.hidden, 128), multiple("moe_hidden_size", p.moe_hidden, 128),
        multiple("moe_intermediate_size", p.moe_inner, 128), multiple("num_key_value_heads", p.kv_heads, kRanks),
        multiple("num_attention_heads", p.q_heads, p.kv_heads > 0 ? p.kv_heads : 1),
        multiple("num_local_experts", p.experts, kRanks), multiple("vocab_size", p.vocab, kRanks),
        multiple("ring slots", p.ring, 16), multiple("capacity", p.capacity, 16)})
    if (!problem.empty()) return problem;
  const auto range = [](const char* name, int64_t value, int64_t low, int64_t high) {
    return value >= low && value <= high ? std::string()
                                         : std::string(name) + " is " + std::to_string(value) + ", expected " +
                                               std::to_string(low) + " to " + std::to_string(high);
  };
  for (const std::string& problem :
       {range("num_hidden_layers", p.layers, 1, kMaxLayers), range("num_experts_per_tok", p.top_k, 1, kMaxTopK),
        range("rows", p.rows, 1, kMaxRows), range("layer_begin", p.layer_begin, 0, p.layers),
        range("layer_end", p.layer_end, p.layer_begin, p.layers),
        range("ring slots", p.ring, Plan::ring_slots(p.window), INT64_MAX)})
    if (!problem.empty()) return problem;
  return {};
}

}  // namespace muse
