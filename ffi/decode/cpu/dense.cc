#include "ffi/decode/cpu/dense.h"

namespace muse {
namespace {

// target_clones needs plain functions: each kind of operand is one.
MUSE_CLONES void load_rows(const uint16_t* x, int64_t blocks, RowBlock* out) {
  for (int64_t b = 0; b < blocks; ++b) load_row_block(x + b * kBlock, out[b]);
}

MUSE_CLONES void bf16_segment(const uint16_t* tiles, int64_t blocks, ColumnTile* unpacked) {
  for (int64_t b = 0; b < blocks; ++b) load_fragment(tiles + b * kTile, unpacked[b]);
}

// Only the segment's own blocks: what fills up its last panel is never read.
MUSE_CLONES void w4a16_segment(const uint8_t* panels, int64_t blocks, ColumnTile* unpacked) {
  for (int64_t b = 0; b < blocks; ++b)
    load_fragment_w4a16(panels + b / kPanelBlocks * kPanelBytes, b % kPanelBlocks, unpacked[b]);
}

MUSE_CLONES void code_segment(const uint8_t* panels, int64_t blocks, CodeTile* unpacked) {
  for (int64_t b = 0; b < blocks; ++b)
    load_fragment(panels + b / kPanelBlocks * kPanelBytes, b % kPanelBlocks, unpacked[b]);
}

MUSE_CLONES void chain_rows(const Operand16& x, int64_t first, const int32_t* rows, int64_t n, const ColumnTile* tiles,
                            int64_t blocks, float* out) {
  for (int64_t i = 0; i < n; ++i) chain16(x.at(rows ? rows[i] : i, first), tiles, blocks, out + i * kLanes);
}

MUSE_CLONES void chain_code_rows(const CodeRow* x, int64_t row_blocks, int64_t first, const int32_t* rows, int64_t n,
                                 const CodeTile* tiles, int64_t blocks, float* out) {
  for (int64_t i = 0; i < n; ++i)
    chain16_codes(x + (rows ? rows[i] : i) * row_blocks + first, tiles, blocks, out + i * kLanes);
}

}  // namespace

void Operand16::load(const uint16_t* x, int64_t row_count, int64_t inner) {
  rows = row_count;
  blocks = inner / kBlock;
  data.resize(rows * blocks);
  load_rows(x, rows * blocks, data.data());
}

void bf16_group(const uint16_t* tiles, int segments, int64_t blocks, const Operand16& x, int64_t first,
                const int32_t* rows, int64_t n, float* out) {
  std::vector<ColumnTile> unpacked(blocks);
  for (int s = 0; s < segments; ++s) {
    bf16_segment(tiles + s * blocks * kTile, blocks, unpacked.data());
    chain_rows(x, first + s * blocks, rows, n, unpacked.data(), blocks, out + s * n * kLanes);
  }
}

void w4a16_group(const uint8_t* panels, int64_t segment_bytes, int64_t blocks, const Operand16& x, const int32_t* rows,
                 int64_t n, float* out) {
  std::vector<ColumnTile> unpacked(blocks);
  for (int s = 0; s < kSegments; ++s) {
    w4a16_segment(panels + s * segment_bytes, blocks, unpacked.data());
    chain_rows(x, s * blocks, rows, n, unpacked.data(), blocks, out + s * n * kLanes);
  }
}

void w4a4_group(const uint8_t* panels, int64_t segment_bytes, int64_t blocks, const CodeRow* x, const int32_t* rows,
                int64_t n, float* out) {
  std::vector<CodeTile> unpacked(blocks);
  for (int s = 0; s < kSegments; ++s) {
    code_segment(panels + s * segment_bytes, blocks, unpacked.data());
    chain_code_rows(x, kSegments * blocks, s * blocks, rows, n, unpacked.data(), blocks, out + s * n * kLanes);
  }
}

}  // namespace muse
