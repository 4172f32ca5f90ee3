// How a block of a fused kernel spends its shared memory: a fixed part with the weight ring (step.cuh), then one region
// that the phases use in turn, sized for the model and checked when a communicator is made.
#pragma once

#include "ffi/decode/plan.h"

namespace muse {

// Rows of one pass through a dense GEMM's weights: two tensor-core tiles of token columns.
constexpr int kPassRows = 16;

// A ring slot holds four NVFP4 panels (16 rows x 512 k) or eight bf16 tiles (16 rows x 128 k).
constexpr int kSlotBytes = 4 * kPanelBytes, kSlotTiles = 8;
// 19.5 MB over 132 blocks: 4 us of reading, as long as an exchange between ranks takes. A power of two, so that
// counters need no division.
constexpr int kSlotsLog2 = 5, kSlots = 1 << kSlotsLog2;

// The sums of a unit of an expert GEMM until its segments are added: segments x row groups x rows x columns x fp32; and
// units under way at once, a power of two.
constexpr int kUnitSumBytes = 8 * 2 * 16 * 8 * 4;
constexpr int kUnitsLog2 = 2, kUnits = 1 << kUnitsLog2;

// The router's rows, of one K segment, that a block holds while it multiplies; a released rank's block of 132 has two.
constexpr int kHeldRouterRows = 4;

// Column-parallel GEMM: a block's tasks are of one K segment of the 16 token columns.
MUSE_FN int64_t dense_operand_bytes(int64_t k) { return k / kSegments / 16 * kTile * 2; }
// Row-parallel GEMM: the rank's K is one segment.
MUSE_FN int64_t row_parallel_operand_bytes(int64_t k) { return k / 16 * kTile * 2; }

}  // namespace muse
