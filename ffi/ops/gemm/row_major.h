// Row-major operands -> the host's 16 x 16 tiles. Shared by the CPU's GEMM and expert kernels.
#pragma once

#include <vector>

#include "ffi/numerics/host_tile.h"
#include "ffi/ops/gemm/gemm.h"

namespace muse {

// Columns n0 .. n0+15 (fewer at the edge: zeros) of block k0 of row-major w [columns, inner].
MUSE_FN void load_tile(const uint16_t* w, int64_t inner, int64_t n0, int64_t columns, int64_t k0, ColumnTile& tile) {
  for (int n = 0; n < kLanes; ++n)
    for (int k = 0; k < kBlock; ++k) tile.bits[k][n] = n0 + n < columns ? w[(n0 + n) * inner + k0 + k] : uint16_t{0};
  finish_tile(tile);
}

MUSE_FN uint32_t code_at(const uint8_t* codes, int64_t index) {
  return (codes[index / 2] >> (index % 2 ? 4 : 0)) & 15u;
}

MUSE_FN void load_tile(Nvfp4 w, int64_t inner, int64_t n0, int64_t columns, int64_t k0, CodeTile& tile) {
  for (int n = 0; n < kLanes; ++n) {
    const bool inside = n0 + n < columns;
    const int64_t base = (n0 + n) * inner + k0;
    tile.scale[n] = inside ? from_e4m3(w.scales[base / kBlock]) : 0.0f;
    for (int k = 0; k < kBlock; ++k) tile.value[k][n] = inside ? from_e2m1(code_at(w.codes, base + k)) : 0.0f;
  }
}

// W4A16: code times block scale is an exact bf16 number.
MUSE_FN void load_tile_w4a16(Nvfp4 w, int64_t inner, int64_t n0, int64_t columns, int64_t k0, ColumnTile& tile) {
  for (int n = 0; n < kLanes; ++n) {
    const bool inside = n0 + n < columns;
    const int64_t base = (n0 + n) * inner + k0;
    const float scale = inside ? from_e4m3(w.scales[base / kBlock]) : 0.0f;
    for (int k = 0; k < kBlock; ++k)
      tile.bits[k][n] = inside ? to_bf16(from_e2m1(code_at(w.codes, base + k)) * scale) : uint16_t{0};
  }
  finish_tile(tile);
}

// A whole row operand.
MUSE_FN void load_row(const uint16_t* x, int64_t inner, RowBlock* out) {
  for (int64_t b = 0; b < inner / kBlock; ++b) load_row_block(x + b * kBlock, out[b]);
}

MUSE_FN void load_row(Nvfp4 x, int64_t row, int64_t inner, CodeRow* out) {
  for (int64_t b = 0; b < inner / kBlock; ++b) {
    const int64_t base = row * inner + b * kBlock;
    out[b].scale = from_e4m3(x.scales[base / kBlock]);
    for (int k = 0; k < kBlock; ++k) out[b].value[k] = from_e2m1(code_at(x.codes, base + k));
  }
}

}  // namespace muse
