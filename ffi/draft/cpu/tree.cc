#include "ffi/draft/cpu/tree.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "ffi/draft/row.h"

namespace muse {
namespace {

// A row's candidates by edge and then id, both kept.
struct Ranked {
  float edge[kMaxCandidates];
  int which[kMaxCandidates];
};

Ranked rank(int64_t count, const int32_t* ids, const float* log_probs) {
  Ranked r;
  std::iota(r.which, r.which + count, 0);
  std::sort(r.which, r.which + count, [&](int a, int b) {
    const float x = draft_edge(log_probs[a]), y = draft_edge(log_probs[b]);
    return x > y || (x == y && ids[a] < ids[b]);
  });
  for (int64_t k = 0; k < count; ++k) r.edge[k] = draft_edge(log_probs[r.which[k]]);
  return r;
}

}  // namespace

void best_first(const DraftCall& call, int64_t b, const int32_t* ids, const float* log_probs) {
  const DraftPlan& p = call.plan;
  const int64_t width = p.width, places = p.places(), count = p.top_k, pair_rows = p.pair_rows();
  std::vector<Ranked> ranked(places * pair_rows);
  for (int64_t i = 0; i < places * pair_rows; ++i)
    ranked[i] = rank(count, ids + i / pair_rows * count, log_probs + i * count);
  int32_t* token = call.tree_token + b * width;
  int32_t* parent = call.tree_parent + b * width;
  int32_t* depth = call.tree_depth + b * width;
  bool* ancestors = call.tree_ancestors + b * width * width;
  std::fill(ancestors, ancestors + width * width, false);
  float score[kMaxNodes] = {};
  int place[kMaxNodes] = {};
  // A node's first child, whose place its next sibling takes when it has come; nothing where the rank is too high.
  struct Next {
    DraftEntry entry;
    int parent, rank;
  };
  std::vector<Next> next;
  const auto row = [&](int node) -> const Ranked& {
    return ranked[depth[node] * pair_rows + (depth[node] == 0 || pair_rows == 1 ? 0 : place[node])];
  };
  const auto offer = [&](int node, int at_rank) {
    if (depth[node] >= places || at_rank >= count) return;
    next.push_back(
        {{score[node] + row(node).edge[at_rank], draft_order(depth[node] + 1, node, at_rank)}, node, at_rank});
  };
  const auto add = [&](int node, int32_t id, int above) {
    token[node] = id, parent[node] = above, depth[node] = above < 0 ? 0 : depth[above] + 1;
    if (above >= 0) std::copy(ancestors + above * width, ancestors + (above + 1) * width, ancestors + node * width);
    ancestors[node * width + node] = true;
  };
  add(0, call.token[b], -1);
  offer(0, 0);
  for (int node = 1; node < width; ++node) {
    const auto best = std::min_element(next.begin(), next.end(),
                                       [](const Next& x, const Next& y) { return comes_before(x.entry, y.entry); });
    const Next taken = *best;
    next.erase(best);
    const Ranked& from = row(taken.parent);
    score[node] = taken.entry.score;
    place[node] = from.which[taken.rank];
    add(node, ids[depth[taken.parent] * count + place[node]], taken.parent);
    offer(taken.parent, taken.rank + 1);
    offer(node, 0);
  }
}

}  // namespace muse
