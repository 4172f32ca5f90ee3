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

// All sixteen codes' values times a scale.
MUSE_FN void code_table(float scale, float* table) {
  for (uint32_t c = 0; c < 16; ++c) table[c] = from_e2m1(c) * scale;
}

// out[k * stride] = the table's entry for code k of one block.
template <typename T>
MUSE_FN void look_up(const uint8_t* codes, const T* table, T* out, int64_t stride) {
  for (int j = 0; j < kBlock / 2; ++j) {
    out[2 * j * stride] = table[codes[j] & 15];
    out[(2 * j + 1) * stride] = table[codes[j] >> 4];
  }
}

MUSE_FN void load_tile(Nvfp4 w, int64_t inner, int64_t n0, int64_t columns, int64_t k0, CodeTile& tile) {
  float table[16];
  code_table(1.0f, table);
  for (int n = 0; n < kLanes; ++n) {
    const int64_t base = (n0 + n) * inner + k0;
    if (n0 + n < columns) {
      tile.scale[n] = from_e4m3(w.scales[base / kBlock]);
      look_up(w.codes + base / 2, table, &tile.value[0][n], kLanes);
    } else {
      tile.scale[n] = 0.0f;
      for (int k = 0; k < kBlock; ++k) tile.value[k][n] = 0.0f;
    }
  }
}

// W4A16: code times block scale is an exact bf16 number.
MUSE_FN void load_tile_w4a16(Nvfp4 w, int64_t inner, int64_t n0, int64_t columns, int64_t k0, ColumnTile& tile) {
  for (int n = 0; n < kLanes; ++n) {
    const int64_t base = (n0 + n) * inner + k0;
    if (n0 + n < columns) {
      float table[16];
      uint16_t operands[16];
      code_table(from_e4m3(w.scales[base / kBlock]), table);
      for (int c = 0; c < 16; ++c) operands[c] = to_bf16(table[c]);
      look_up(w.codes + base / 2, operands, &tile.bits[0][n], kLanes);
    } else {
      for (int k = 0; k < kBlock; ++k) tile.bits[k][n] = 0;
    }
  }
  finish_tile(tile);
}

// A whole row operand.
MUSE_FN void load_row(const uint16_t* x, int64_t inner, RowBlock* out) {
  for (int64_t b = 0; b < inner / kBlock; ++b) load_row_block(x + b * kBlock, out[b]);
}

MUSE_FN void load_row(Nvfp4 x, int64_t row, int64_t inner, CodeRow* out) {
  float table[16];
  code_table(1.0f, table);
  for (int64_t b = 0; b < inner / kBlock; ++b) {
    const int64_t base = row * inner + b * kBlock;
    out[b].scale = from_e4m3(x.scales[base / kBlock]);
    look_up(x.codes + base / 2, table, out[b].value, 1);
  }
}

}  // namespace muse
