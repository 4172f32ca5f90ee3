// GEMMs of the fused step on the CPU, over weights in fragment order.
#pragma once

#include <cstdint>
#include <vector>

#include "ffi/decode/cpu/fragments.h"

namespace muse {

// Rows of a GEMM operand, unpacked once and shared by all column groups and ranks.
struct Operand16 {
  int64_t rows = 0, blocks = 0;  // blocks of 16 along K
  std::vector<RowBlock> data;
  void load(const uint16_t* x, int64_t row_count, int64_t inner);
  const RowBlock* at(int64_t row, int64_t block) const { return data.data() + row * blocks + block; }
};

// Sixteen columns: out[(segment * n + i) * 16 + column] = chain over the segment of row rows[i] (or i when rows is
// null), K being `segments` segments of `blocks` blocks that start at block `first` of the operand.
void bf16_group(const uint16_t* tiles, int segments, int64_t blocks, const Operand16& x, int64_t first,
                const int32_t* rows, int64_t n, float* out);

// The same for the eight segments of an NVFP4 group of panels, `segment_bytes` apart, and bf16 rows (W4A16), or NVFP4
// rows (W4A4: `x` has `kSegments * blocks` blocks a row).
void w4a16_group(const uint8_t* panels, int64_t segment_bytes, int64_t blocks, const Operand16& x, const int32_t* rows,
                 int64_t n, float* out);
void w4a4_group(const uint8_t* panels, int64_t segment_bytes, int64_t blocks, const CodeRow* x, const int32_t* rows,
                int64_t n, float* out);

// tree8 over the segments of out for row i, column c.
MUSE_FN float group_sum(const float* out, int64_t n, int64_t i, int c) {
  float s[kSegments];
  for (int g = 0; g < kSegments; ++g) s[g] = out[(g * n + i) * kLanes + c];
  return tree8(s);
}

}  // namespace muse
