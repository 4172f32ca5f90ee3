// Which weights a block reads, in which order: the producer that fetches them and the warps that use them both walk
// this schedule and count chunks (ring.cuh). A GEMM's work is cut into tasks of one warp, one chain over a K segment of
// 16 output columns, and a block takes a contiguous run of them, so that all blocks finish within one task of each
// other.
#pragma once

#include "ffi/decode/cuda/budget.h"
#include "ffi/decode/step.h"

namespace muse {

struct Range {
  int32_t begin, end;
};

// Part `index` of `size` of `total` things; products stay far below 2^31.
MUSE_FN Range part(int32_t total, uint32_t index, uint32_t size) {
  return {static_cast<int32_t>(static_cast<uint32_t>(total) * index / size),
          static_cast<int32_t>(static_cast<uint32_t>(total) * (index + 1) / size)};
}

// Quotients by a number that stays: 32-bit division is long code. Exact while n times the divisor is below 2^32, which
// prepare_layers and prepare_head check.
struct Divisor {
  int32_t value;
  uint32_t inverse;  // 2^32 / value, rounded up; of 1 it would not fit
  MUSE_FN int32_t quotient(int32_t n) const {
    const uint64_t product = static_cast<uint64_t>(static_cast<uint32_t>(n)) * inverse;
    return value == 1 ? n : static_cast<int32_t>(product >> 32);
  }
};
MUSE_FN Divisor divisor(int32_t value) {
  if (value == 0) return {};  // of what the launch does not have: a GEMM, a ring
  return {value, UINT32_MAX / static_cast<uint32_t>(value) + 1};
}

// Part `index` of `size` of `groups` things in each of some K segments, ordered by segment: of one segment, so that a
// block needs little of the operand. Blocks that are too many for equal shares of the segments have nothing: of 132
// blocks four, which costs no time where tasks are few, because the others' share is rounded up anyway.
MUSE_FN Range segment_part(int32_t groups, int32_t segments, uint32_t index, uint32_t size) {
  const uint32_t each = size / segments, segment = index / each;
  if (segment >= static_cast<uint32_t>(segments)) return {0, 0};
  const Range own = part(groups, index - segment * each, each);
  const auto first = static_cast<int32_t>(segment) * groups;
  return {first + own.begin, first + own.end};
}

// A bf16 GEMM of all layers. Tasks are ordered by segment, then row group.
struct DenseJob {
  const uint16_t* tiles;             // of the rank, layer 0
  int32_t groups, segments, blocks;  // 16-row groups; K segments; 16-blocks of K in a segment
  int32_t first, of_layer;           // of the groups of a layer's weight, where others have the rest

  Divisor by_groups;

  // A block's tasks, and the segment that they are of.
  MUSE_FN Range tasks(uint32_t index, uint32_t size) const { return segment_part(groups, segments, index, size); }
  MUSE_FN int32_t segment(Range tasks) const { return by_groups.quotient(tasks.begin); }
  MUSE_FN int32_t chunks() const { return (blocks + kSlotTiles - 1) / kSlotTiles; }
  MUSE_FN int32_t chunk_tiles(int32_t c) const {
    return blocks - c * kSlotTiles < kSlotTiles ? blocks - c * kSlotTiles : kSlotTiles;
  }
  // Tiles are counted in 32 bits (prepare_layers): 64-bit products are long code.
  MUSE_FN const uint16_t* chunk(int32_t layer, int32_t group, int32_t segment, int32_t c) const {
    const int32_t tile = ((layer * of_layer + first + group) * segments + segment) * blocks + c * kSlotTiles;
    return tiles + int64_t{tile} * kTile;
  }
};

// Rows [first, end) of the layer's `rows`.
MUSE_FN DenseJob column_parallel_job(const uint16_t* tiles, int64_t rows, int64_t k, int64_t first, int64_t end) {
  return {tiles,
          static_cast<int32_t>((end - first) / 16),
          kSegments,
          static_cast<int32_t>(k / kSegments / 16),
          static_cast<int32_t>(first / 16),
          static_cast<int32_t>(rows / 16),
          divisor(static_cast<int32_t>((end - first) / 16))};
}
MUSE_FN DenseJob column_parallel_job(const uint16_t* tiles, int64_t rows, int64_t k) {
  return column_parallel_job(tiles, rows, k, 0, rows);
}
MUSE_FN DenseJob row_parallel_job(const uint16_t* tiles, int64_t rows, int64_t k) {
  const auto groups = static_cast<int32_t>(rows / 16);
  return {tiles, groups, 1, static_cast<int32_t>(k / 16), 0, groups, divisor(groups)};
}

// The dense GEMMs of a layer, in their order. u, attention's gates, by itself: nobody waits for it before attention
// ends, and the sums of q, k and v have time to arrive.
enum class Gemm : uint32_t { kQkv, kGates, kOutput, kPreExpert, kPostExpert };
constexpr int kDenseGemms = 5;

MUSE_FN DenseJob dense_job(const Plan& p, const RankPointers& w, Gemm which) {
  const int64_t rows = p.qkvu_rows(), gates = rows - p.q_columns();
  return which == Gemm::kQkv         ? column_parallel_job(w.qkvu, rows, p.hidden, 0, gates)
         : which == Gemm::kGates     ? column_parallel_job(w.qkvu, rows, p.hidden, gates, rows)
         : which == Gemm::kOutput    ? row_parallel_job(w.o, p.hidden, p.q_columns())
         : which == Gemm::kPreExpert ? column_parallel_job(w.pre_expert, p.moe_columns(), p.hidden)
                                     : row_parallel_job(w.post_expert, p.hidden, p.moe_columns());
}

// One GEMM of the experts of all layers of one format. A unit is two row groups of 16: for the first GEMM a gate and an
// up group, so that SwiGLU stays in the block; for the second two neighbours, or one where their number is odd. A warp
// takes a segment of both side by side.
struct ExpertJob {
  const unsigned char* weights;  // of the rank, the format's first layer, expert 0
  int32_t groups;                // units of an expert
  int32_t unit_groups;           // row groups of a unit: 2 or 1
  int32_t segment_bytes;         // of a row group
  int32_t chunk_bytes;           // at most kSlotBytes
  int32_t chunks;                // of a segment of a row group
  int32_t k_blocks;              // 16-blocks of K in a segment
  Divisor by_groups;

  MUSE_FN int32_t bytes(int32_t c) const {
    return segment_bytes - c * chunk_bytes < chunk_bytes ? segment_bytes - c * chunk_bytes : chunk_bytes;
  }
  // Segment 0 of the first row group of unit `unit` of an expert, which is counted through the format's layers.
  MUSE_FN const unsigned char* unit(int32_t expert, int32_t unit) const {
    return weights + int64_t{(expert * groups + unit) * unit_groups} * (kSegments * segment_bytes);
  }
};

MUSE_FN ExpertJob expert_job(const Plan& p, const RankPointers& w, bool nvfp4, bool second) {
  ExpertJob job{};
  const int64_t k = second ? p.moe_inner : p.moe_hidden, blocks = k / kSegments / 16;
  const int32_t rows = static_cast<int32_t>(second ? p.moe_columns() : 2 * p.inner_columns());
  job.unit_groups = rows % 32 ? 1 : 2;
  job.groups = rows / 16 / job.unit_groups;
  job.by_groups = divisor(job.groups);
  job.k_blocks = static_cast<int32_t>(blocks);
  if (nvfp4) {
    job.weights = second ? w.w2_fp4 : w.w13_fp4;
    job.segment_bytes = static_cast<int32_t>(p.panels(k) * kPanelBytes);
    job.chunk_bytes = kSlotBytes;
  } else {
    job.weights = reinterpret_cast<const unsigned char*>(second ? w.w2_bf16 : w.w13_bf16);
    job.segment_bytes = static_cast<int32_t>(blocks * kTile * 2);
    job.chunk_bytes = kSlotTiles * kTile * 2;
  }
  job.chunks = (job.segment_bytes + job.chunk_bytes - 1) / job.chunk_bytes;
  return job;
}

// A layer's GEMMs: the dense ones, and between the last two the experts' two.
constexpr int kExpertStage = kDenseGemms - 1, kStages = kDenseGemms + 2;

// All GEMMs of a rank, worked out once, and a block's parts of the dense ones: a layer's, then the head's.
constexpr int kHeadJob = kDenseGemms;
struct Jobs {
  DenseJob dense[kHeadJob + 1];
  Range tasks[kHeadJob + 1];  // of the block
  ExpertJob experts[2][2];    // [NVFP4][second]
};

}  // namespace muse
