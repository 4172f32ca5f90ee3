// Fragment order of the decode weights: one 16 x 16 tile is stored as the 32 lanes of mma.m16n8k16 hold its A operand,
// so that a GPU warp loads a tile with one 16-byte (bf16) or 4-byte (NVFP4) access per lane and no shuffle. The CPU
// reads the same bytes (cpu/fragments.h). docs/architecture.md draws the picture; muse_jax/weights/repack.py writes it.
#pragma once

#include "ffi/numerics/formats.h"

namespace muse {

constexpr int64_t kTile = 256;       // elements of a 16 x 16 tile
constexpr int64_t kTileWords = 32;   // 32-bit words of an NVFP4 tile
constexpr int64_t kTileScales = 16;  // e4m3 scales of an NVFP4 tile, one per row

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
