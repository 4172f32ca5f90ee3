// Fragment tiles of the decode weights -> the host's 16 x 16 tiles.
#pragma once

#include <cstring>

#include "ffi/decode/layout.h"
#include "ffi/numerics/host_tile.h"

namespace muse {

MUSE_FN void load_fragment(const uint16_t* tile, ColumnTile& out) {
  for (int g = 0; g < 8; ++g)
    for (int t = 0; t < 4; ++t)
      for (int j = 0; j < 4; ++j)
        for (int p = 0; p < 2; ++p)
          out.bits[fragment_k(t, j, p)][fragment_row(g, j)] = tile[(4 * g + t) * 8 + 2 * j + p];
  finish_tile(out);
}

MUSE_FN uint32_t code_word(const uint8_t* panel, int block, int lane) {
  uint32_t word;
  std::memcpy(&word, panel + panel_code(block, lane), sizeof word);
  return word;
}

// Block of an NVFP4 panel -> code values and scales as fp32 (W4A4).
MUSE_FN void load_fragment(const uint8_t* panel, int block, CodeTile& out) {
  for (int g = 0; g < 8; ++g)
    for (int t = 0; t < 4; ++t) {
      const uint32_t word = code_word(panel, block, 4 * g + t);
      for (int j = 0; j < 4; ++j)
        for (int p = 0; p < 2; ++p)
          out.value[fragment_k(t, j, p)][fragment_row(g, j)] = from_e2m1(fragment_code(word, j, p));
    }
  for (int n = 0; n < kLanes; ++n) out.scale[n] = from_e4m3(panel[panel_scale(block, n)]);
}

// Block of an NVFP4 panel -> exact bf16 products of code and scale (W4A16).
MUSE_FN void load_fragment_w4a16(const uint8_t* panel, int block, ColumnTile& out) {
  float scale[kLanes];
  for (int n = 0; n < kLanes; ++n) scale[n] = from_e4m3(panel[panel_scale(block, n)]);
  for (int g = 0; g < 8; ++g)
    for (int t = 0; t < 4; ++t) {
      const uint32_t word = code_word(panel, block, 4 * g + t);
      for (int j = 0; j < 4; ++j)
        for (int p = 0; p < 2; ++p) {
          const int row = fragment_row(g, j);
          out.bits[fragment_k(t, j, p)][row] = to_bf16(from_e2m1(fragment_code(word, j, p)) * scale[row]);
        }
    }
  finish_tile(out);
}

}  // namespace muse
