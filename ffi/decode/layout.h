// Fragment order of the decode weights: one 16 x 16 tile is stored as the 32 lanes of mma.m16n8k16 hold its A operand,
// so that a GPU warp loads a tile with one 16-byte (bf16) or 4-byte (NVFP4) access per lane and no shuffle. The CPU reads
// the same bytes. docs/architecture.md draws the picture; muse_jax/weights/repack.py writes it.
#pragma once

#include "ffi/numerics/host_tile.h"

namespace muse {

constexpr int64_t kTile = 256;       // elements of a 16 x 16 tile
constexpr int64_t kTileWords = 32;   // 32-bit words of an NVFP4 tile
constexpr int64_t kTileScales = 16;  // e4m3 scales of an NVFP4 tile, one per row

// Lane 4g + t, register j, half p of the A operand hold element (row g + 8 (j & 1), k 2t + p + 8 (j >> 1)).
MUSE_FN int fragment_row(int g, int j) { return g + 8 * (j & 1); }
MUSE_FN int fragment_k(int t, int j, int p) { return 2 * t + p + 8 * (j >> 1); }

MUSE_FN void load_fragment(const uint16_t* tile, ColumnTile& out) {
  for (int g = 0; g < 8; ++g)
    for (int t = 0; t < 4; ++t)
      for (int j = 0; j < 4; ++j)
        for (int p = 0; p < 2; ++p)
          out.bits[fragment_k(t, j, p)][fragment_row(g, j)] = tile[(4 * g + t) * 8 + 2 * j + p];
  finish_tile(out);
}

// The four codes of a 16-bit half word; code j belongs to register j. Shift and mask give fp16 numbers on the GPU:
// signs at bits 15, 12, 14, 13 and magnitudes from bits 9, 6, 3, 0.
MUSE_FN uint32_t half_word_code(uint32_t half, int j) {
  constexpr int kSign[4] = {15, 12, 14, 13};
  return ((half >> (9 - 3 * j)) & 7u) | ((half >> kSign[j]) & 1u) << 3;
}

MUSE_FN uint32_t fragment_code(uint32_t word, int j, int p) { return half_word_code((word >> (16 * p)) & 0xFFFFu, j); }

// NVFP4 tile -> code values and scales as fp32 (W4A4).
MUSE_FN void load_fragment(const uint32_t* words, const uint8_t* scales, CodeTile& out) {
  for (int g = 0; g < 8; ++g)
    for (int t = 0; t < 4; ++t)
      for (int j = 0; j < 4; ++j)
        for (int p = 0; p < 2; ++p)
          out.value[fragment_k(t, j, p)][fragment_row(g, j)] = from_e2m1(fragment_code(words[4 * g + t], j, p));
  for (int n = 0; n < kLanes; ++n) out.scale[n] = from_e4m3(scales[n]);
}

// NVFP4 tile -> exact bf16 products of code and scale (W4A16).
MUSE_FN void load_fragment_w4a16(const uint32_t* words, const uint8_t* scales, ColumnTile& out) {
  float scale[kLanes];
  for (int n = 0; n < kLanes; ++n) scale[n] = from_e4m3(scales[n]);
  for (int g = 0; g < 8; ++g)
    for (int t = 0; t < 4; ++t)
      for (int j = 0; j < 4; ++j)
        for (int p = 0; p < 2; ++p) {
          const int row = fragment_row(g, j);
          out.bits[fragment_k(t, j, p)][row] = to_bf16(from_e2m1(fragment_code(words[4 * g + t], j, p)) * scale[row]);
        }
  finish_tile(out);
}

}  // namespace muse
