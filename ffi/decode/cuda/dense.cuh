// bf16 GEMM tasks: weights from the ring are the A operand (16 output rows), tokens the B operand (8 columns each), held
// in shared memory in the order in which lanes read them.
//
// Token operands lie in memory as column tiles: 16 rows x 16 k, 32 lanes x 16 bytes; lane 4g + t holds k 2t, 2t+1, 2t+8,
// 2t+9 of row g, then of row g + 8. Sixteen rows are a pass; a step with more reads the weights once per pass.
#pragma once

#include "ffi/decode/cuda/schedule.h"
#include "ffi/decode/cuda/step.cuh"
#include "ffi/numerics/mma.cuh"

namespace muse {

constexpr int kPassRows = 16;

// Where element (row i, k) stands in an operand of `width` columns, in 16-bit elements.
__device__ __forceinline__ int64_t column_tile_at(int i, int64_t k, int64_t width) {
  return (i / kPassRows) * kPassRows * width + (k >> 4) * kTile + ((i & 7) * 4 + ((k & 7) >> 1)) * 8 +
         ((i >> 3) & 1) * 4 + ((k >> 3) & 1) * 2 + (k & 1);
}

using Accumulators = float[2][4];

// acc += chain over the tiles of one chunk. `operand`: the lane's first column tile. kTwo: rows 8 to 15 exist.
template <bool kTwo>
__device__ __forceinline__ void chain_tiles(const unsigned char* chunk, const uint4* operand, int tiles, int lane,
                                            Accumulators& acc) {
  const uint4* weights = reinterpret_cast<const uint4*>(chunk) + lane;
#pragma unroll
  for (int b = 0; b < kSlotTiles; ++b) {
    if (b >= tiles) break;
    const uint4 w = weights[b * 32], x = operand[b * 32];
    const uint32_t a[4] = {w.x, w.y, w.z, w.w}, x0[2] = {x.x, x.y}, x1[2] = {x.z, x.w};
    mma_bf16(acc[0], a, x0);
    if (kTwo) mma_bf16(acc[1], a, x1);
  }
}

class DenseSteps : protected StepBase {
 public:
  using StepBase::StepBase;

 protected:
  // Column tiles [first, first + tiles) of the pass that starts at row i0 -> the region; rows that do not exist are not
  // fetched.
  __device__ void load_operand(const uint16_t* operand, int64_t width, int i0, int32_t first, int32_t tiles) {
    const uint4* from = reinterpret_cast<const uint4*>(operand + i0 * width + first * kTile);
    uint4* to = region<uint4>();
    const int count = rows() - i0;
#pragma unroll 8
    for (int at = thread_index(); at < tiles * 32; at += kThreads)
      if (at % 32 / 4 < count) to[at] = __ldcg(from + at);
  }

  // This block's tasks of `job` over all active rows, whose operand has `width` columns.
  // emit(row group, segment, pass's first row, accumulators); also(pass's first row, the segments in the region) runs
  // while the operand is still there.
  template <typename Emit, typename Also>
  __device__ void dense(const DenseJob& job, const uint16_t* operand, int64_t width, Emit emit, Also also) {
    for (int i0 = 0; i0 < rows(); i0 += kPassRows) dense_pass(job, operand, width, i0, emit, also);
  }

  template <typename Emit, typename Also>
  __device__ void dense_pass(const DenseJob& job, const uint16_t* operand, int64_t width, int i0, Emit emit,
                             Also also) {
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    const Range range = part(job.tasks(), place_.index, place_.size);
    const Range segments = segments_of(job.segments);
    const int32_t chunks = job.chunks();
    load_operand(operand, width, i0, segments.begin * job.blocks, (segments.end - segments.begin) * job.blocks);
    sync_block();
    uint32_t start = place_.chunk;
    for (int32_t first = range.begin; first < range.end; first += kWarps) {
      const int32_t at_once = min(kWarps, range.end - first);
      if (warp < at_once) {
        const int32_t task = first + warp, segment = task / job.groups;
        const uint4* x = region<uint4>() + (segment - segments.begin) * job.blocks * 32 + lane;
        Accumulators acc = {};
        for (int32_t c = 0; c < chunks; ++c, x += kSlotTiles * 32) {
          const uint32_t chunk = start + c * at_once + warp;
          const unsigned char* weights = ring_.wait(chunk);
          if (rows() - i0 > 8)
            chain_tiles<true>(weights, x, job.chunk_tiles(c), lane, acc);
          else
            chain_tiles<false>(weights, x, job.chunk_tiles(c), lane, acc);
          ring_.release(chunk, lane);
        }
        emit(task % job.groups, segment, i0, acc);
      }
      start += at_once * chunks;
    }
    also(i0, segments);
    sync_block();
    if (thread_index() == 0) place_.chunk = start;  // read after the next barrier
  }

  // The K segments that this block's run of column-parallel tasks touches, whatever the number of row groups.
  __device__ Range segments_of(int32_t segments) const {
    return {static_cast<int32_t>(segments * place_.index / place_.size),
            static_cast<int32_t>((segments * (place_.index + 1) + place_.size - 1) / place_.size)};
  }

  // Column-parallel results: segment sums [segment][stride rows from `first`][columns] in the rank's scratch, added by sum_of.
  __device__ void store_sums(float* sums, int64_t stride, int64_t columns, int group, int segment, int i0,
                             const Accumulators& acc, int first = 0) const {
    const int g = thread_index() % 32 / 4, t = thread_index() % 4;
    for (int b = 0; b < 2; ++b)
      for (int j = 0; j < 4; ++j) {
        const int i = i0 + 8 * b + 2 * t + (j & 1);
        if (i < rows()) sums[(segment * stride + i - first) * columns + group * 16 + g + 8 * (j >> 1)] = acc[b][j];
      }
  }

  __device__ static float sum_of(const float* sums, int64_t stride, int64_t columns, int i, int64_t column) {
    float s[kSegments];
#pragma unroll
    for (int r = 0; r < kSegments; ++r) s[r] = __ldcg(sums + (r * stride + i) * columns + column);
    return tree8(s);
  }
};

}  // namespace muse
