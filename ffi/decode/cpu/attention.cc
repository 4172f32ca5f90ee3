#include "ffi/decode/cpu/attention.h"

#include <algorithm>
#include <map>

#include "ffi/comm/pool.h"
#include "ffi/ops/attention/row.h"

namespace muse {
namespace {

// One kv head of one sequence with all its rows and all query heads that share it.
struct Group {
  const Plan* plan;
  int64_t layer;
  const uint16_t *k, *v;  // the cache of this sequence and head: [slots, 64]
  const ActiveRow* const* rows;
  int64_t row_count, heads;  // query heads per kv head
  const uint16_t* const* q;  // per row: the first of its `heads` heads
  uint16_t* const* a;
};

// Bits of the block at `start` that the row sees.
MUSE_FN uint32_t visible_mask(const Plan& plan, int64_t layer, const ActiveRow& row, int64_t start) {
  const int64_t first = plan.first_visible(layer, row.position);
  uint32_t mask = 0;
  for (int i = 0; i < kBlock; ++i) mask |= static_cast<uint32_t>(start + i >= first && start + i <= row.position) << i;
  return mask;
}

// A block that reaches beyond the committed length differs from row to row: column c is the key at position start + c,
// committed or this row's ancestor.
MUSE_FN void gather_block(const Group& g, const ActiveRow& row, int64_t start, uint32_t visible, ColumnTile* k_tiles,
                          ColumnTile* v_tiles) {
  uint16_t k[kBlock][kHeadDim] = {}, v[kBlock][kHeadDim] = {};
  for (int i = 0; i < kBlock; ++i) {
    if (!(visible >> i & 1u)) continue;
    const int64_t position = start + i;
    const int64_t source = position < row.committed ? position : row.path[position - row.committed];
    const int64_t slot = g.plan->slot(g.layer, source);
    memcpy(k[i], g.k + slot * kHeadDim, sizeof(k[i]));
    memcpy(v[i], g.v + slot * kHeadDim, sizeof(v[i]));
  }
  load_kv_block(k[0], v[0], kHeadDim, kBlock, k_tiles, v_tiles);
}

MUSE_CLONES void attend_group(const Group& g, AttentionRow* states) {
  const Plan& plan = *g.plan;
  int64_t first = INT64_MAX, last = 0;
  for (int64_t r = 0; r < g.row_count; ++r) {
    first = std::min(first, plan.first_visible(g.layer, g.rows[r]->position));
    last = std::max(last, g.rows[r]->position);
    for (int64_t h = 0; h < g.heads; ++h) states[r * g.heads + h].begin(g.q[r] + h * kHeadDim, plan.score_scale);
  }
  const int64_t committed = g.rows[0]->committed;  // of the sequence
  ColumnTile k_tiles[kHeadBlocks], v_tiles[kHeadBlocks];
  for (int64_t start = first / kBlock * kBlock; start <= last; start += kBlock) {
    const bool shared = start + kBlock <= committed;
    if (shared) {
      const int64_t slot = plan.slot(g.layer, start);
      load_kv_block(g.k + slot * kHeadDim, g.v + slot * kHeadDim, kHeadDim, kBlock, k_tiles, v_tiles);
    }
    for (int64_t r = 0; r < g.row_count; ++r) {
      const uint32_t visible = visible_mask(plan, g.layer, *g.rows[r], start);
      if (!visible) continue;
      if (!shared) gather_block(g, *g.rows[r], start, visible, k_tiles, v_tiles);
      for (int64_t h = 0; h < g.heads; ++h) states[r * g.heads + h].block(start, k_tiles, v_tiles, visible);
    }
  }
  for (int64_t r = 0; r < g.row_count; ++r)
    for (int64_t h = 0; h < g.heads; ++h) states[r * g.heads + h].finish(g.a[r] + h * kHeadDim);
}

}  // namespace

void attend(const StepCall& call, int64_t layer, const std::vector<ActiveRow>& rows, const uint16_t* q, uint16_t* a) {
  const Plan& plan = call.plan;
  std::map<int32_t, std::vector<int64_t>> by_sequence;
  for (size_t i = 0; i < rows.size(); ++i) by_sequence[rows[i].sequence].push_back(static_cast<int64_t>(i));
  std::vector<std::pair<int32_t, std::vector<int64_t>>> sequences(by_sequence.begin(), by_sequence.end());

  const int64_t width = plan.q_heads * kHeadDim, heads = plan.q_heads / plan.kv_heads;
  const bool full = plan.kind[layer].full;
  parallel_for(static_cast<int64_t>(sequences.size()) * plan.kv_heads, [&](int64_t item) {
    const auto& [sequence, members] = sequences[item / plan.kv_heads];
    const int64_t kv_head = item % plan.kv_heads, rank = kv_head / plan.kv_rank();
    const RankPointers& pointers = call.rank[rank];
    const int64_t base = plan.cache(layer, sequence, kv_head % plan.kv_rank(), 0);
    std::vector<const ActiveRow*> group_rows;
    std::vector<const uint16_t*> group_q;
    std::vector<uint16_t*> group_a;
    for (const int64_t i : members) {
      group_rows.push_back(&rows[i]);
      group_q.push_back(q + i * width + kv_head * heads * kHeadDim);
      group_a.push_back(a + i * width + kv_head * heads * kHeadDim);
    }
    std::vector<AttentionRow> states(members.size() * heads);
    attend_group({&plan, layer, (full ? pointers.k_full : pointers.k_ring) + base,
                  (full ? pointers.v_full : pointers.v_ring) + base, group_rows.data(),
                  static_cast<int64_t>(members.size()), heads, group_q.data(), group_a.data()},
                 states.data());
  });
}

}  // namespace muse
