// Fragment order of the decode weights: a 16 x 16 tile is stored as the 32 lanes of mma.m16n8k16 hold its A operand, so
// that a GPU warp needs no shuffle and every access is 16 bytes per lane: one bf16 tile, or four NVFP4 tiles. The CPU
// reads the same bytes (cpu/fragments.h). docs/architecture.md draws the picture; muse_jax/weights/repack.py writes it.
#pragma once

#include "ffi/numerics/formats.h"

namespace muse {

constexpr int64_t kTile = 256;  // elements of a 16 x 16 tile

// An NVFP4 panel is 16 rows x 128 k, eight blocks of 16 k: 1024 bytes of codes and then their 128 e4m3 scales, one
// piece of memory that a single bulk copy brings in. A segment is whole panels, the last one filled up with zeros, so
// that every segment starts a panel; at the released sizes nothing is filled up.
constexpr int64_t kPanelBlocks = 8, kPanelBytes = 1152;

// Byte of the 32-bit code word of a lane: its words of four blocks are neighbours, one 16-byte load.
MUSE_FN int64_t panel_code(int block, int lane) { return ((block / 4) * 32 + lane) * 16 + (block % 4) * 4; }

// Byte of a scale: the scales of rows g and g + 8, which lane 4g + t needs, of all eight blocks are one 16-byte load.
MUSE_FN int64_t panel_scale(int block, int row) { return 1024 + (row % 8) * 16 + block * 2 + row / 8; }

// Lane 4g + t, register j, half p of the A operand hold element (row g + 8 (j & 1), k 2t + p + 8 (j >> 1)).
MUSE_FN int fragment_row(int g, int j) { return g + 8 * (j & 1); }
MUSE_FN int fragment_k(int t, int j, int p) { return 2 * t + p + 8 * (j >> 1); }

// The four codes of a 16-bit half word; code j belongs to register j. Shift and mask give fp16 numbers on the GPU:
// signs at bits 15, 12, 14, 13 and magnitudes from bits 9, 6, 3, 0.
MUSE_FN uint32_t half_word_code(uint32_t half, int j) {
  constexpr int kSign[4] = {15, 12, 14, 13};
  return ((half >> (9 - 3 * j)) & 7u) | ((half >> kSign[j]) & 1u) << 3;
}

MUSE_FN uint32_t fragment_code(uint32_t word, int j, int p) { return half_word_code((word >> (16 * p)) & 0xFFFFu, j); }

}  // namespace muse
