// Every dimension of a draft call, in one struct that host and device share.
#pragma once

#include <cstdint>
#include <string>

#include "ffi/numerics/portability.h"

namespace muse {

constexpr int kMaxDraftLayers = 16;  // keeps the call a plain struct that can be a kernel argument
constexpr int kMaxCandidates = 32;   // of one place: a lane each
constexpr int kMaxNodes = 64;        // of a tree, and rows of a block: what a step of the target takes
constexpr int kMaxDraftHeadDim = 128;
constexpr int kChunkKeys = 128;  // keys whose probabilities are summed in one piece

struct DraftPlan {
  // the draft; group 0 and rank 0: DFlash, without convolution and selector
  int64_t layers, hidden, heads, kv_heads, head_dim, inner, taps, block, top_k, rank, group, vocab;
  float eps, multiplier, cap, score_scale;
  int64_t window[kMaxDraftLayers];  // 0: all of the context
  // the call
  int64_t batch, fed, width;  // sequences; tokens to be added to the context of each; nodes of a tree, 0: no trees
  int64_t slots[kMaxDraftLayers];

  MUSE_FN bool is_v2() const { return rank != 0; }
  MUSE_FN int64_t q_columns() const { return heads * head_dim; }
  MUSE_FN int64_t kv_columns() const { return kv_heads * head_dim; }
  MUSE_FN int64_t per_kv() const { return heads / kv_heads; }
  MUSE_FN int64_t conv_rows() const { return group ? 4 * hidden / group : 0; }
  MUSE_FN int64_t rows() const { return batch * block; }
  // Places after the newest token that a tree can reach; the head sees these rows only.
  MUSE_FN int64_t places() const { return width > 2 ? width - 1 : 1; }
  // Log-probabilities of a place's candidates: one row, or one for each candidate of the place before.
  MUSE_FN int64_t pair_rows() const { return is_v2() ? top_k : 1; }
  // Chunks of a sequence's keys: the context's slots, and then the block.
  MUSE_FN int64_t chunks(int64_t l) const { return (slots[l] + kChunkKeys - 1) / kChunkKeys + 1; }
};

// From the attribute `dims` of the call, whose order is the contract with muse_jax/speculative/dflash_call.py.
constexpr int kDraftDims = 12;
inline void read_dims(const int64_t* d, DraftPlan* p) {
  p->hidden = d[0], p->heads = d[1], p->kv_heads = d[2], p->head_dim = d[3], p->inner = d[4], p->taps = d[5];
  p->block = d[6], p->top_k = d[7], p->rank = d[8], p->group = d[9], p->vocab = d[10], p->width = d[11];
}

// Empty when the plan can run; otherwise what is wrong, for the caller's error.
inline std::string check_draft_plan(const DraftPlan& p) {
  const auto range = [](const char* name, int64_t value, int64_t low, int64_t high) {
    return value >= low && value <= high ? std::string()
                                         : std::string(name) + " is " + std::to_string(value) + ", expected " +
                                               std::to_string(low) + " to " + std::to_string(high);
  };
  const auto multiple = [](const char* name, int64_t value, int64_t of) {
    return value > 0 && value % of == 0 ? std::string()
                                        : std::string(name) + " is " + std::to_string(value) +
                                              ", expected a positive multiple of " + std::to_string(of);
  };
  for (const std::string& problem :
       {range("layers", p.layers, 1, kMaxDraftLayers), multiple("hidden_size", p.hidden, 128),
        range("head_dim", p.head_dim, 16, kMaxDraftHeadDim), multiple("head_dim", p.head_dim, 16),
        range("num_key_value_heads", p.kv_heads, 1, INT32_MAX),
        multiple("num_attention_heads", p.heads, p.kv_heads > 0 ? p.kv_heads : 1),
        multiple("num_attention_heads * head_dim", p.q_columns(), 128), multiple("intermediate_size", p.inner, 128),
        range("tapped layers", p.taps, 1, INT32_MAX), range("block_width", p.block, 2, kMaxNodes),
        range("width", p.width, 0, p.block), range("top_k", p.top_k, 1, kMaxCandidates),
        multiple("vocab_size", p.vocab, 8), range("top_k", p.top_k, 1, p.vocab),
        range("selector_rank", p.rank, 0, INT32_MAX), range("conv_group_size", p.group, 0, p.hidden),
        multiple("hidden_size", p.hidden, p.group ? p.group : 1), range("batch", p.batch, 1, INT32_MAX)})
    if (!problem.empty()) return problem;
  return (p.rank == 0) == (p.group == 0) ? std::string() : "selector_rank and conv_group_size go together";
}

}  // namespace muse
