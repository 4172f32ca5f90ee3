#include "ffi/ops/attention/attention.h"

#include <algorithm>
#include <vector>

#include "ffi/comm/pool.h"
#include "ffi/ops/attention/row.h"

namespace muse {
namespace {

constexpr int64_t kRowTile = 16;  // query rows that share one unpacking of a K/V block

struct Span {
  int64_t first, last;  // positions a row sees; empty when last < first
};

Span seen(const Attention& op, int64_t position) {
  const int64_t first = op.window > 0 ? std::max<int64_t>(0, position - op.window + 1) : 0;
  return {first, std::min(position, op.keys - 1)};
}

// The positions block .. block+15 inside a span, as bits.
uint32_t visible_bits(Span span, int64_t block) {
  const int64_t low = std::max<int64_t>(span.first - block, 0), high = std::min<int64_t>(span.last - block, kBlock - 1);
  return high < low ? 0u : (0xFFFFu >> (kBlock - 1 - (high - low))) << low;
}

// Up to kRowTile rows of one sequence, for the query heads of one kv head.
MUSE_CLONES void row_tile(const Attention& op, const uint16_t* q, const uint16_t* k, const uint16_t* v,
                          const int32_t* position, int64_t sequence, int64_t kv_head, int64_t first_row, uint16_t* a) {
  const int64_t group = op.heads / op.kv_heads, rows = std::min(kRowTile, op.rows - first_row);
  const int64_t stride = op.kv_heads * kHead, base = sequence * op.keys * stride + kv_head * kHead;
  std::vector<AttentionRow> state(rows * group);
  Span spans[kRowTile], all{op.keys, -1};
  for (int64_t t = 0; t < rows; ++t) {
    spans[t] = seen(op, position[first_row + t]);
    if (spans[t].last >= spans[t].first) all = {std::min(all.first, spans[t].first), std::max(all.last, spans[t].last)};
  }
  const auto head_at = [&](int64_t t, int64_t g) {
    return (((sequence * op.rows + first_row + t) * op.heads) + kv_head * group + g) * kHead;
  };
  for (int64_t t = 0; t < rows; ++t)
    for (int64_t g = 0; g < group; ++g) state[t * group + g].begin(q + head_at(t, g), op.scale);
  ColumnTile k_tiles[kHeadBlocks], v_tiles[kHeadBlocks];
  for (int64_t block = all.first / kBlock * kBlock; block <= all.last; block += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, op.keys - block));
    bool loaded = false;
    for (int64_t t = 0; t < rows; ++t) {
      const uint32_t visible = visible_bits(spans[t], block);
      if (!visible) continue;
      if (!loaded) load_kv_block(k + base + block * stride, v + base + block * stride, stride, count, k_tiles, v_tiles);
      loaded = true;
      for (int64_t g = 0; g < group; ++g) state[t * group + g].block(block, k_tiles, v_tiles, visible);
    }
  }
  for (int64_t t = 0; t < rows; ++t)
    for (int64_t g = 0; g < group; ++g) state[t * group + g].finish(a + head_at(t, g));
}

MUSE_CLONES void gate_row(int64_t heads, float eps, const uint16_t* a, const uint16_t* u, uint16_t* o) {
  for (int64_t at = 0; at < heads * kHead; at += kHead) attention_gate_head(a + at, u + at, eps, o + at);
}

}  // namespace

Status attention(Stream, Attention op, const uint16_t* q, const uint16_t* k, const uint16_t* v, const int32_t* position,
                 uint16_t* a) {
  const int64_t tiles = (op.rows + kRowTile - 1) / kRowTile;
  parallel_for(op.batch * op.kv_heads * tiles, [&](int64_t i) {
    // The longest rows of causal attention come last; start with them.
    const int64_t tile = tiles - 1 - i / (op.batch * op.kv_heads), head = i % op.kv_heads;
    row_tile(op, q, k, v, position, i / op.kv_heads % op.batch, head, tile * kRowTile, a);
  });
  return {};
}

Status attention_gate(Stream, int64_t rows, int64_t heads, float eps, const uint16_t* a, const uint16_t* u,
                      uint16_t* o) {
  const int64_t width = heads * kHead;
  parallel_for(rows, [&](int64_t t) { gate_row(heads, eps, a + t * width, u + t * width, o + t * width); });
  return {};
}

}  // namespace muse
