// Sixteen columns of a canonical GEMM for many rows: a segment's tiles are unpacked once and used by all rows. Shared
// by the CPU's GEMM and expert kernels.
#pragma once

#include <vector>

#include "ffi/ops/gemm/row_major.h"

namespace muse {

struct Bf16Weights {
  using Row = RowBlock;
  using Tile = ColumnTile;
  const uint16_t* w;
  MUSE_FN void load(int64_t inner, int64_t n0, int64_t columns, int64_t k0, Tile& tile) const {
    load_tile(w, inner, n0, columns, k0, tile);
  }
  MUSE_FN float finish(float y) const { return y; }
};

struct W4A16Weights {
  using Row = RowBlock;
  using Tile = ColumnTile;
  Nvfp4 w;
  float scale;
  MUSE_FN void load(int64_t inner, int64_t n0, int64_t columns, int64_t k0, Tile& tile) const {
    load_tile_w4a16(w, inner, n0, columns, k0, tile);
  }
  MUSE_FN float finish(float y) const { return y * scale; }
};

struct W4A4Weights {
  using Row = CodeRow;
  using Tile = CodeTile;
  Nvfp4 w;
  float scale;  // weight_scale_2 * input_scale
  MUSE_FN void load(int64_t inner, int64_t n0, int64_t columns, int64_t k0, Tile& tile) const {
    load_tile(w, inner, n0, columns, k0, tile);
  }
  MUSE_FN float finish(float y) const { return y * scale; }
};

MUSE_FN void chain_segment(const RowBlock* a, const ColumnTile* b, int64_t n, float* out) { chain16(a, b, n, out); }
MUSE_FN void chain_segment(const CodeRow* a, const CodeTile* b, int64_t n, float* out) { chain16_codes(a, b, n, out); }

// sums[t * 16 + n] = row t with column n0 + n of w [columns, inner], finished and canonical; rows[t] holds inner / 16
// blocks. Columns past the edge count as zeros.
template <typename Weights>
MUSE_FN void column_sums(const Weights& weights, int64_t inner, int64_t n0, int64_t columns,
                         const typename Weights::Row* const* rows, int64_t count, float* sums) {
  const int64_t segment = inner / kBlock / kSegments;
  std::vector<typename Weights::Tile> tiles(segment);
  std::vector<float> partial(count * kSegments * kLanes);
  for (int g = 0; g < kSegments; ++g) {
    for (int64_t b = 0; b < segment; ++b) weights.load(inner, n0, columns, (g * segment + b) * kBlock, tiles[b]);
    for (int64_t t = 0; t < count; ++t)
      chain_segment(rows[t] + g * segment, tiles.data(), segment, &partial[(t * kSegments + g) * kLanes]);
  }
  for (int64_t t = 0; t < count; ++t)
    for (int n = 0; n < kLanes; ++n) {
      float s[kSegments];
      for (int g = 0; g < kSegments; ++g) s[g] = partial[(t * kSegments + g) * kLanes + n];
      sums[t * kLanes + n] = canonical(weights.finish(tree8(s)));
    }
}

}  // namespace muse
