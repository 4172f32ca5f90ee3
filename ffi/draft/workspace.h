// A GPU's memory for one draft call, a result of the call like any other.
#pragma once

#include "ffi/draft/plan.h"

namespace muse {

constexpr int64_t kMaxDraftBlocks = 256;  // of a launch, one per multiprocessor
constexpr int64_t kDraftTokens = 16;      // of one pass through the weights: two tensor-core tiles

// Offsets in bytes. A launch starts with `control` zero.
struct DraftWorkspace {
  int64_t control, x, h, operand[2], projected, coefficients, branch, partials, logits, gate, best, sums, ids, edges,
      ranks;
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
  const auto most = [](int64_t a, int64_t b) { return a > b ? a : b; };
  const int64_t fed = draft_passes(p.batch * p.fed) * kDraftTokens, rows = draft_passes(p.rows()) * kDraftTokens;
  const int64_t places = p.batch * p.places(), chosen = places * p.pair_rows() * p.top_k;
  int64_t chunks = 0;
  for (int64_t l = 0; l < p.layers; ++l) chunks = most(chunks, p.chunks(l));
  w.control = take(256);
  w.x = take(rows * p.hidden * 2);
  w.h = take(rows * p.hidden * 2);
  w.operand[0] = take(most(fed * p.taps * p.hidden, rows * most(p.hidden, p.q_columns())) * 2);
  w.operand[1] = take(rows * p.inner * 2);
  w.projected = take(most(fed * 2 * p.layers * p.kv_columns(), rows * (p.q_columns() + 2 * p.kv_columns())) * 2);
  w.coefficients = take(rows * p.conv_rows() * 2);
  w.branch = take(most(fed, rows) * p.hidden * 2);
  // Of each sequence, kv head and chunk, for each of its rows and query heads: numerators, denominator, largest score.
  w.partials = take(p.rows() * p.heads * chunks * (p.head_dim + 2) * 4);
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
