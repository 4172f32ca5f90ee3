// bf16 GEMM tasks: weights from the ring are the A operand (16 output rows), tokens the B operand (8 columns each),
// held in shared memory in the order in which lanes read them.
//
// Token operands lie in memory as column tiles: 16 rows x 16 k, 32 lanes x 16 bytes; lane 4g + t holds k 2t, 2t+1,
// 2t+8, 2t+9 of row g, then of row g + 8. A step of more rows than a pass has reads the weights once per pass.
#pragma once

#include "ffi/decode/cuda/schedule.h"
#include "ffi/decode/cuda/step.cuh"
#include "ffi/device/ptx.cuh"

namespace muse {

// Where element (row i, k) stands in an operand of `width` columns, in 16-bit elements. Even k and the next are
// neighbours.
__device__ __forceinline__ int column_tile_at(int i, int k, int width) {
  return (i / kPassRows) * kPassRows * width + (k >> 4) * static_cast<int>(kTile) + ((i & 7) * 4 + ((k & 7) >> 1)) * 8 +
         ((i >> 3) & 1) * 4 + ((k >> 3) & 1) * 2 + (k & 1);
}

using Accumulators = float[2][4];

// A few tiles of both operands, in registers: while the products of some run, the next ones' loads are under way.
constexpr int kStepTiles = 2, kChunkSteps = kSlotTiles / kStepTiles;
struct StepTiles {
  uint4 weights[kStepTiles], tokens[kStepTiles];
};

__device__ __forceinline__ void load_step(const uint4* weights, const uint4* tokens, StepTiles& step) {
#pragma unroll
  for (int b = 0; b < kStepTiles; ++b) step.weights[b] = weights[b * 32], step.tokens[b] = tokens[b * 32];
}

// acc += a tile's products. Two: rows 8 to 15 exist.
__device__ __forceinline__ void multiply_tile(const uint4& w, const uint4& x, bool two, Accumulators& acc) {
  const uint32_t a[4] = {w.x, w.y, w.z, w.w}, x0[2] = {x.x, x.y}, x1[2] = {x.z, x.w};
  ptx::mma_bf16(acc[0], a, x0);
  if (two) ptx::mma_bf16(acc[1], a, x1);
}

// acc = the chain over a task's chunks, every stride-th of the ring from `first` on. `operand`: the lane's first column
// tile.
__device__ __forceinline__ void chain_chunks(const Ring& ring, const DenseJob& job, uint32_t first, uint32_t stride,
                                             const uint4* operand, int lane, bool two, Accumulators& acc) {
  const auto tiles = [lane](const unsigned char* chunk) { return reinterpret_cast<const uint4*>(chunk) + lane; };
  const int chunks = job.chunks();
  uint32_t c = first;
  if (job.blocks % kSlotTiles) {  // not at the released sizes
#pragma unroll 1
    for (int i = 0; i < chunks; ++i, c += stride, operand += kSlotTiles * 32) {
      const uint4* weights = tiles(ring.wait(c));
#pragma unroll 1
      for (int b = 0; b < job.chunk_tiles(i); ++b) multiply_tile(weights[b * 32], operand[b * 32], two, acc);
      ring.release(c, lane);
    }
    return;
  }
  int there = ring.wait_run(c, stride, chunks, lane);  // chunks, from the first on
  const uint4* weights = tiles(ring.slot(c));
  StepTiles step[2];
  load_step(weights, operand, step[0]);
#pragma unroll 1
  for (int i = 1; i <= chunks; ++i) {
#pragma unroll
    for (int e = 0; e < kChunkSteps; ++e) {
      constexpr int kStepQuads = kStepTiles * 32;
      if (e + 1 < kChunkSteps) {
        load_step(weights + (e + 1) * kStepQuads, operand + (e + 1) * kStepQuads, step[(e + 1) % 2]);
        if (e + 2 == kChunkSteps) ring.release(c, lane);  // all are loaded
      } else {
        const bool more = i < chunks;  // behind the last chunk something that is of no use
        c += stride;
        if (more && i == there) there += ring.wait_run(c, stride, chunks - i, lane);
        weights = more ? tiles(ring.slot(c)) : operand;
        if (more) operand += kSlotTiles * 32;
        load_step(weights, operand, step[0]);
      }
#pragma unroll
      for (int b = 0; b < kStepTiles; ++b) multiply_tile(step[e % 2].weights[b], step[e % 2].tokens[b], two, acc);
    }
  }
}

class DenseBase : public StepBase {
 public:
  using StepBase::StepBase;

 protected:
  // Column tiles [first, first + tiles) of the pass that starts at row i0 -> the region; rows that do not exist are not
  // fetched.
  __device__ void load_operand(const uint16_t* operand, int width, int i0, int first, int tiles) {
    const uint4* from = reinterpret_cast<const uint4*>(operand + i0 * width + first * static_cast<int>(kTile));
    const uint32_t to = ptx::shared_address(region<uint4>());
    const int count = rows() - i0, end = tiles * 32;
#pragma unroll 4
    for (int at = thread_index(); at < end; at += kThreads)
      if ((at & 31) / 4 < count)  // past L1, all in flight
        ptx::copy16(to + at * 16, from + at);
    ptx::wait_all_copies();
  }

  // This block's tasks of `job` for the pass that starts at row i0; their segment of the operand is in the region.
  // tasks() makes a warp's share, by dense_tasks. Where the computing warps are too few, the finishing warps help.
  template <typename Tasks>
  __device__ __forceinline__ void dense_pass(const DenseJob& job, Range range, Tasks tasks) {
    const bool helped = range.end - range.begin > kWarps;
    sync_block();
    if (helped) units_.begin_dense();
    if (thread_index() == 0) ring_.set_streaming(true);
    tasks();
    if (helped) units_.wait_dense_end(place_.dense);
    sync_block();
    if (thread_index() > 0) return;  // read after the next barrier
    ring_.set_streaming(false);
    place_.chunk += (range.end - range.begin) * job.chunks();
    place_.dense += helped;
  }

  // The tasks of the calling warp; emit(row group, accumulators).
  template <typename Emit>
  __device__ __forceinline__ void dense_tasks(const DenseJob& job, Range range, int i0, Emit emit) {
    const int index = thread_index() / 32, warp = index < kWarps ? index : index - 1, lane = thread_index() % 32;
    static_assert(kFirstFinisher == kWarps + 1, "the producer is left out");
    const int first_task = job.segment(range) * job.groups;
    const bool two = rows() - i0 > 8;
    uint32_t start = place_.chunk;
#pragma unroll 1
    for (int first = range.begin; first < range.end; first += kTasksAtOnce) {
      const int at_once = min(kTasksAtOnce, range.end - first);
      if (warp < at_once) {
        Accumulators acc = {};
        chain_chunks(ring_, job, start + warp, at_once, region<uint4>() + lane, lane, two, acc);
        emit(first + warp - first_task, acc);
      }
      start += at_once * job.chunks();
    }
  }

  // What a lane holds of a task's results: emit(row, column, sum), counted from row i0 + 2 t, of those that exist, and
  // column g.
  template <typename Emit>
  __device__ __forceinline__ void for_results(int i0, const Accumulators& acc, Emit emit) const {
    const int left = rows() - i0 - thread_index() % 4 * 2;
#pragma unroll
    for (int b = 0; b < 2; ++b)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (8 * b + (j & 1) < left) emit(8 * b + (j & 1), 8 * (j >> 1), acc[b][j]);
  }

  // Sums as slot words, of row `row` and column `column` at slot[row * columns + column].
  __device__ __forceinline__ void store_results(uint64_t* slot, int columns, int i0, const Accumulators& acc) const {
    const uint32_t epoch = place_.epoch;
    for_results(i0, acc, [&](int row, int column, float sum) {
      store_slot(slot + row * columns + column, bit_cast<uint32_t>(sum), epoch);
    });
  }

  // Column-parallel results: segment sums [segment][stride rows][columns] in the rank's scratch, of rows i0 ...
  __device__ void store_sums(float* sums, int stride, int columns, int group, int segment, int i0, int row0,
                             const Accumulators& acc) const {
    const int g = thread_index() % 32 / 4, t = thread_index() % 4;
    float* at = sums + (segment * stride + i0 - row0 + 2 * t) * columns + group * 16 + g;
    for_results(i0, acc, [&](int row, int column, float sum) { at[row * columns + column] = sum; });
  }
};

// The finishing warps' part of a dense GEMM that has tasks for them; `pass`: how many such passes there were. False:
// the block is leaving.
template <auto kMultiply>
__device__ bool help(BlockShared& shared, Range tasks, uint32_t& pass) {
  if (tasks.end - tasks.begin <= kWarps) return true;
  const UnitQueue units(shared.units);
#pragma unroll 1
  for (int i0 = 0; i0 < shared.rows.count; i0 += kPassRows, ++pass) {
    if (!units.wait_dense(pass, Ring(shared.ring))) return false;
    run_phase<kMultiply>(i0);
    units.end_dense();
  }
  return true;
}

}  // namespace muse
