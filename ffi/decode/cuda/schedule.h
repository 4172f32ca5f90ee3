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

// A bf16 GEMM. Tasks are ordered by segment, then row group, so that a block needs few segments of the operand.
struct DenseJob {
  const uint16_t* tiles;
  int32_t groups, segments, blocks;  // 16-row groups; K segments; 16-blocks of K in a segment

  MUSE_FN int32_t tasks() const { return groups * segments; }
  MUSE_FN int32_t chunks() const { return (blocks + kSlotTiles - 1) / kSlotTiles; }
  MUSE_FN int32_t chunk_tiles(int32_t c) const {
    return blocks - c * kSlotTiles < kSlotTiles ? blocks - c * kSlotTiles : kSlotTiles;
  }
  MUSE_FN const uint16_t* chunk(int32_t group, int32_t segment, int32_t c) const {
    return tiles + ((int64_t{group} * segments + segment) * blocks + c * kSlotTiles) * kTile;
  }
};

MUSE_FN DenseJob column_parallel_job(const uint16_t* tiles, int64_t rows, int64_t k) {
  return {tiles, static_cast<int32_t>(rows / 16), kSegments, static_cast<int32_t>(k / kSegments / 16)};
}
MUSE_FN DenseJob row_parallel_job(const uint16_t* tiles, int64_t rows, int64_t k) {
  return {tiles, static_cast<int32_t>(rows / 16), 1, static_cast<int32_t>(k / 16)};
}

MUSE_FN DenseJob qkvu_job(const Plan& p, const RankPointers& w, int64_t l) {
  return column_parallel_job(w.qkvu + p.qkvu(l), p.qkvu_rows(), p.hidden);
}
MUSE_FN DenseJob o_job(const Plan& p, const RankPointers& w, int64_t l) {
  return row_parallel_job(w.o + p.o(l), p.hidden, p.q_columns());
}
MUSE_FN DenseJob pre_expert_job(const Plan& p, const RankPointers& w, int64_t l) {
  return column_parallel_job(w.pre_expert + p.pre_expert(l), p.moe_columns(), p.hidden);
}
MUSE_FN DenseJob post_expert_job(const Plan& p, const RankPointers& w, int64_t l) {
  return row_parallel_job(w.post_expert + p.post_expert(l), p.hidden, p.moe_columns());
}

// One GEMM of the experts in use. A unit is two row groups of 16: for the first GEMM a gate and an up group, so that
// SwiGLU stays in the block; for the second two neighbours, or one where their number is odd. A warp takes a segment of
// both side by side.
struct ExpertJob {
  const unsigned char* weights;  // expert 0
  int64_t expert_bytes;
  int32_t groups;         // units of an expert
  int32_t unit_groups;    // row groups of a unit: 2 or 1
  int32_t segment_bytes;  // of a row group
  int32_t chunk_bytes;    // at most kSlotBytes
  int32_t k_blocks;       // 16-blocks of K in a segment, padded for NVFP4

  MUSE_FN int32_t chunks() const { return (segment_bytes + chunk_bytes - 1) / chunk_bytes; }
  MUSE_FN int32_t bytes(int32_t c) const {
    return segment_bytes - c * chunk_bytes < chunk_bytes ? segment_bytes - c * chunk_bytes : chunk_bytes;
  }
  // Row group `group` of an expert, segment 0.
  MUSE_FN const unsigned char* group(int32_t expert, int32_t group) const {
    return weights + expert * expert_bytes + int64_t{group} * kSegments * segment_bytes;
  }
};

MUSE_FN ExpertJob expert_job(const Plan& p, const RankPointers& w, int64_t l, bool second) {
  ExpertJob job{};
  const int64_t k = second ? p.moe_inner : p.moe_hidden, blocks = k / kSegments / 16;
  const int32_t rows = static_cast<int32_t>(second ? p.moe_columns() : 2 * p.inner_columns());
  job.unit_groups = rows % 32 ? 1 : 2;
  job.groups = rows / 16 / job.unit_groups;
  if (p.kind[l].nvfp4) {
    job.weights = second ? w.w2_fp4 + p.w2_fp4(l, 0, 0) : w.w13_fp4 + p.w13_fp4(l, 0, 0);
    job.segment_bytes = static_cast<int32_t>(p.panels(k) * kPanelBytes);
    job.chunk_bytes = kSlotBytes;
    job.k_blocks = static_cast<int32_t>(p.panels(k) * kPanelBlocks);
  } else {
    const uint16_t* tiles = second ? w.w2_bf16 + p.w2_tile(l, 0) * kTile : w.w13_bf16 + p.w13_tile(l, 0) * kTile;
    job.weights = reinterpret_cast<const unsigned char*>(tiles);
    job.segment_bytes = static_cast<int32_t>(blocks * kTile * 2);
    job.chunk_bytes = kSlotTiles * kTile * 2;
    job.k_blocks = static_cast<int32_t>(blocks);
  }
  job.expert_bytes = int64_t{job.groups} * job.unit_groups * kSegments * job.segment_bytes;
  return job;
}

}  // namespace muse
