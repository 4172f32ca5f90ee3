// A GPU's memory for one draft call, a result of the call like any other.
#pragma once

#include "ffi/draft/plan.h"
#include "ffi/numerics/reduce.h"

namespace muse {

constexpr int64_t kMaxDraftBlocks = 256;  // of a launch, one per multiprocessor
constexpr int64_t kDraftTokens = 16;      // of one pass through the weights: two tensor-core tiles

// So many buffers of a size, one after the other.
struct DraftBuffers {
  int64_t begin, size;
  MUSE_FN int64_t of(int64_t n) const { return begin + n * size; }
};

// Offsets in bytes. A launch starts with `control` zero and with every bit of `words` set.
struct DraftWorkspace {
  int64_t control, x, logits, gate, best, sums, ids, edges, ranks;
  DraftBuffers partials;  // of even and of odd layers: one is read while the next is written
  // What phases tell each other: words of two bf16 numbers, or one fp32 number, that are their own flags. Each is
  // stored once in a launch, so nobody need know who has read it.
  int64_t words, word_bytes;
  int64_t features, fused, context, context_sums, keys_values;     // of the tokens that are added to the context
  DraftBuffers normed, row_sums, coefficients, convolved, branch;  // by sublayer; the first two also of the head
  DraftBuffers projected, heads, attended, gated;                  // by layer
  int64_t bytes;
};

MUSE_FN int64_t draft_passes(int64_t rows) { return (rows + kDraftTokens - 1) / kDraftTokens; }

MUSE_FN DraftWorkspace draft_workspace(const DraftPlan& p) {
  DraftWorkspace w{};
  int64_t at = 0;
  const auto take = [&](int64_t bytes) {
    const int64_t begin = at;
    at += (bytes + 127) / 128 * 128;
    return begin;
  };
  const auto several = [&](int64_t count, int64_t bytes) {
    const int64_t size = (bytes + 127) / 128 * 128;
    return DraftBuffers{take(count * size), size};
  };
  const int64_t fed = p.batch * p.fed, fed_operand = draft_passes(fed) * kDraftTokens * 2;
  const int64_t rows = p.rows(), operand = draft_passes(rows) * kDraftTokens * 2;  // bytes of a column
  const int64_t places = p.batch * p.places(), chosen = places * p.pair_rows() * p.top_k;
  const int64_t sublayers = 2 * p.layers;
  int64_t chunks = 0;
  for (int64_t l = 0; l < p.layers; ++l) chunks = p.chunks(l) > chunks ? p.chunks(l) : chunks;
  w.control = take(256);
  w.words = at;
  w.features = take(fed_operand * p.taps * p.hidden);
  w.fused = take(fed * p.hidden * 2);
  w.context = take(fed_operand * p.hidden);
  w.context_sums = take(fed * kSegments * 4);
  w.keys_values = take(fed * 2 * p.layers * p.kv_columns() * 2);
  if (p.width > 0) {
    w.normed = several(sublayers + 1, operand * p.hidden);
    w.row_sums = several(sublayers + 1, rows * kSegments * 4);
    w.coefficients = several(sublayers, rows * p.conv_rows() * 2);
    w.convolved = several(sublayers, p.group ? operand * p.hidden : 0);
    w.branch = several(sublayers, rows * p.hidden * 2);
    w.projected = several(p.layers, rows * (p.q_columns() + 2 * p.kv_columns()) * 2);
    w.heads = several(p.layers, rows * (p.q_columns() + p.kv_columns()) * 2);
    w.attended = several(p.layers, operand * p.q_columns());
    w.gated = several(p.layers, operand * p.inner);
  }
  w.word_bytes = at - w.words;
  w.x = take(rows * p.hidden * 2);
  // Of each sequence, kv head and chunk, for each of its rows and query heads: numerators, denominator, largest score.
  w.partials = several(2, rows * p.heads * chunks * (p.head_dim + 2) * 4);
  w.logits = take(draft_passes(places) * kDraftTokens * p.vocab * 4);
  w.gate = take(draft_passes(places) * kDraftTokens * p.rank * 2);
  w.best = take(places * kMaxDraftBlocks * p.top_k * 8);
  w.sums = take(places * 8 * 4);
  w.ids = take(places * p.top_k * 8);
  w.edges = take(chosen * 4);
  w.ranks = take(chosen);
  w.bytes = at;
  return w;
}

}  // namespace muse
