#include "ffi/draft/accept.h"

#include <cstring>
#include <vector>

#include "ffi/comm/pool.h"
#include "ffi/numerics/formats.h"

namespace muse {
namespace {

// The walk of sequence b from the root: at each node the first child with the token that the target put there.
void walk(const AcceptCall& c, int64_t b) {
  const int64_t first = b * c.width;
  const auto there = [&](int64_t node) { return c.active[b] && c.lengths[b] + node < c.capacity; };
  const auto follows = [&](int64_t node) { return c.nan[first + node] || !there(node) ? -1 : c.chosen[first + node]; };
  const auto child = [&](int64_t node) -> int64_t {
    for (int64_t i = node + 1; i < c.width; ++i)
      if (c.parent[first + i] == node && c.token[first + i] == follows(node)) return there(i) ? i : -1;
    return -1;
  };
  int64_t node = there(0) ? 0 : -1, end = 0, last = 0;
  for (; node >= 0; node = child(node)) c.path[first + end++] = static_cast<int32_t>(last = node);
  for (int64_t d = 0; d < c.width; ++d) {
    if (d >= end) c.path[first + d] = 0;
    const int64_t at = c.path[first + d];
    c.follows[first + d] = follows(at);
    c.seen[first + d] = c.token[first + at];
  }
  const bool ended = end > 0 && c.nan[first + last];
  c.ended[b] = ended;
  c.committed[b] = static_cast<int32_t>(end);
  c.count[b] = static_cast<int32_t>(end) - ended;
  c.next[b] = end > 0 && !ended ? follows(last) : 0;
  c.grown[b] = c.lengths[b] + static_cast<int32_t>(end);
}

}  // namespace

Status accept(Stream, const AcceptCall& c) {
  for (int64_t b = 0; b < c.batch; ++b) walk(c, b);
  for (int which = 0; which < kCaches; ++which) {
    const int64_t slots = c.slots[which], per_sequence = c.heads;
    parallel_for(c.ranks * c.layers[which] * c.batch, [&](int64_t unit) {
      const int64_t b = unit % c.batch;
      for (int64_t head = 0; head < per_sequence; ++head) {
        uint16_t* rows = c.cache[which] + (unit * per_sequence + head) * slots * kCacheRow;
        // Node i lies in slot length + i, the node at depth r belongs in slot length + r, and no node is above its
        // depth: going up, no row is written before it was read.
        for (int64_t r = 1; r < c.committed[b]; ++r)
          memmove(rows + (c.lengths[b] + r) % slots * kCacheRow,
                  rows + (c.lengths[b] + c.path[b * c.width + r]) % slots * kCacheRow, kCacheRow * sizeof(uint16_t));
      }
    });
  }
  if (!c.residuals) return {};
  parallel_for(c.batch * c.width, [&](int64_t i) {
    const int64_t row = i / c.width * c.width + c.path[i], all = c.batch * c.width;
    for (int64_t e = 0; e < c.taps; ++e) {
      const float* from = c.residuals + ((2 * c.tap[e] + 1) * all + row) * c.hidden;
      uint16_t* to = c.features + (i * c.taps + e) * c.hidden;
      for (int64_t j = 0; j < c.hidden; ++j) to[j] = to_bf16(from[j]);
    }
  });
  return {};
}

}  // namespace muse
