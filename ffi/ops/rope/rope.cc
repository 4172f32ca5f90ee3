#include "ffi/ops/rope/rope.h"

#include "ffi/comm/pool.h"
#include "ffi/ops/rope/row.h"

namespace muse {
namespace {

MUSE_CLONES void heads(const NormRope& op, const uint16_t* x, const float* table, int64_t row, uint16_t* y) {
  const float* cos = op.rotate ? table + row * kHead : nullptr;
  const float* sin = op.rotate ? cos + kHead / 2 : nullptr;
  for (int64_t at = row * op.heads * kHead; at < (row + 1) * op.heads * kHead; at += kHead)
    norm_rope_head(x + at, cos, sin, op.eps, y + at);
}

MUSE_CLONES void cached(const NormRope& op, const uint16_t* v, int64_t row, uint16_t* k_cached, uint16_t* v_cached) {
  for (int64_t at = row * op.heads * kHead; at < (row + 1) * op.heads * kHead; at += kHead) {
    memcpy(v_cached + at, v + at, kHead * sizeof(uint16_t));
    canonical_kv(k_cached + at, v_cached + at);
  }
}

}  // namespace

Status q_norm_rope(Stream, NormRope op, const uint16_t* x, const float* table, uint16_t* y) {
  parallel_for(op.rows, [&](int64_t row) { heads(op, x, table, row, y); });
  return {};
}

Status kv_norm_rope(Stream, NormRope op, const uint16_t* k, const uint16_t* v, const float* table, uint16_t* k_cached,
                    uint16_t* v_cached) {
  parallel_for(op.rows, [&](int64_t row) {
    heads(op, k, table, row, k_cached);
    cached(op, v, row, k_cached, v_cached);
  });
  return {};
}

}  // namespace muse
