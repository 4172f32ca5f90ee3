// One block's tile of the canonical GEMM on tensor cores (docs/numerics.md 5). Inside each of the eight K segments the
// tensor core itself continues the chain; the segments' sums are folded by tree8 as they come, so that at most three
// of them wait: one in registers, two in shared memory.
#pragma once

#include "ffi/device/ptx.cuh"
#include "ffi/numerics/nvfp4.cuh"
#include "ffi/ops/shared_memory.cuh"

namespace muse {

enum class Kind {
  kBf16,   // bf16 weights
  kW4A16,  // NVFP4 weights, expanded to bf16
  kW4A4  // the same, and x holds expanded codes too: a block's sum is then its exact term, and terms are added in fp32
};

constexpr int kTileStep = 64;

// kRows x kColumns results by warps of kWarpRows x kWarpColumns, and kStages stages of kTileStep elements of K.
template <int kRows_, int kColumns_, int kWarpRows_, int kWarpColumns_, int kStages_>
struct TileShape {
  static constexpr int kRows = kRows_, kColumns = kColumns_, kStages = kStages_;
  static constexpr int kWarpRows = kWarpRows_, kWarpColumns = kWarpColumns_;
  static constexpr int kWarpsAcross = kColumns / kWarpColumns, kThreads = 32 * (kRows / kWarpRows) * kWarpsAcross;
  static constexpr int kRowTiles = kWarpRows / 16, kColumnTiles = kWarpColumns / 8;
  static constexpr int kStageBytes = (kRows + kColumns) * kTileRowBytes;
  static constexpr int kWaiting = kRowTiles * kColumnTiles;  // float4s per thread and level
  static constexpr int kStagesBytes = kStages * kStageBytes;
  static constexpr int kSharedBytes = kStagesBytes + 2 * kWaiting * 16 * kThreads;
};

using LargeTile = TileShape<128, 128, 64, 32, 3>;
using MediumTile = TileShape<64, 64, 32, 32, 3>;
using SmallTile = TileShape<16, 64, 16, 16, 4>;

struct TileWeights {
  const void* values;     // bf16 or codes
  const uint8_t* scales;  // NVFP4 only
};

template <typename Shape>
using TileSums = float[Shape::kRowTiles][Shape::kColumnTiles][4];

namespace tile_detail {

// The place in a tile of the i-th 16-byte chunk that a thread copies: its chunks lie a multiple of eight rows apart.
template <typename Shape>
__device__ __forceinline__ uint32_t part_offset(int i) {
  static_assert(Shape::kThreads % (8 * kTileChunks) == 0, "the swizzle repeats every eight rows");
  return tile_offset(threadIdx.x / kTileChunks, threadIdx.x % kTileChunks) +
         i * Shape::kThreads / kTileChunks * kTileRowBytes;
}

// Bytes from the start of a bf16 matrix to a 16-byte chunk of stage k of a row; some valid place for a row outside.
__device__ __forceinline__ int64_t operand_offset(int row, int inner, int k, int chunk) {
  return (static_cast<int64_t>(row < 0 ? 0 : row) * inner + k * kTileStep + chunk * 8) * 2;
}

// Where a thread's part of B comes from. bf16: 16-byte chunks, copied asynchronously. NVFP4: 16-element blocks, which
// pass through registers.
template <typename Shape, Kind kKind>
struct WeightLoader {
  static constexpr bool kCodes = kKind != Kind::kBf16;
  static constexpr int kPerRow = kCodes ? kTileStep / 16 : kTileChunks;
  static constexpr int kParts = Shape::kColumns * kPerRow / Shape::kThreads;
  int row[kParts];  // negative: outside
  uint2 codes[kCodes ? kParts : 1];
  uint32_t scale[kCodes ? kParts : 1];

  template <typename Row>
  __device__ __forceinline__ void begin(Row row_of_column) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) row[i] = row_of_column((threadIdx.x + i * Shape::kThreads) / kPerRow);
  }

  // Fetches stage k (in units of kTileStep).
  __device__ __forceinline__ void fetch(TileWeights w, int inner, int k, uint32_t tile) {
    const auto* values = static_cast<const uint8_t*>(w.values);
    const int part = threadIdx.x % kPerRow;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      if constexpr (kCodes) {
        const int64_t block = static_cast<int64_t>(row[i]) * (inner / 16) + k * (kTileStep / 16) + part;
        codes[i] = row[i] >= 0 ? __ldg(reinterpret_cast<const uint2*>(values) + block) : uint2{0, 0};
        scale[i] = row[i] >= 0 ? __ldg(w.scales + block) : 0u;
      } else {
        ptx::copy16(tile + part_offset<Shape>(i), values + operand_offset(row[i], inner, k, part), row[i] >= 0);
      }
    }
  }

  // Puts what fetch left in registers into the tile.
  __device__ __forceinline__ void finish(unsigned char* tile) {
    if constexpr (kCodes) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const int part = threadIdx.x + i * Shape::kThreads, row = part / kPerRow, chunk = part % kPerRow * 2;
        uint4 operands[2];
        expand_block(codes[i], static_cast<uint8_t>(scale[i]), operands);
        *reinterpret_cast<uint4*>(tile + tile_offset(row, chunk)) = operands[0];
        *reinterpret_cast<uint4*>(tile + tile_offset(row, chunk + 1)) = operands[1];
      }
    }
  }
};

// The sums of segments 0 .. 6 that still wait for their partners.
template <typename Shape>
struct Fold {
  TileSums<Shape> even;  // of the last even segment
  float4* levels;        // of a pair, of a quad

  // After segment 7 acc is the result.
  __device__ __forceinline__ void end_segment(int segment, TileSums<Shape>& acc) {
    if (segment % 2 == 0) {
      for_each([&](int, float (&a)[4], float (&e)[4]) { e[0] = a[0], e[1] = a[1], e[2] = a[2], e[3] = a[3]; }, acc);
    } else if (segment % 4 == 1) {
      for_each([&](int i, float (&a)[4], float (&e)[4]) { level(0, i) = pair(a, e); }, acc);
    } else if (segment == 3) {
      for_each([&](int i, float (&a)[4], float (&e)[4]) { level(1, i) = add(level(0, i), pair(a, e)); }, acc);
    } else {
      for_each(
          [&](int i, float (&a)[4], float (&e)[4]) {
            const float4 sum = add(level(1, i), add(level(0, i), pair(a, e)));
            a[0] = sum.x, a[1] = sum.y, a[2] = sum.z, a[3] = sum.w;
          },
          acc);
    }
  }

 private:
  template <typename Use>
  __device__ __forceinline__ void for_each(Use use, TileSums<Shape>& acc) {
#pragma unroll
    for (int i = 0; i < Shape::kRowTiles; ++i)
#pragma unroll
      for (int j = 0; j < Shape::kColumnTiles; ++j) use(i * Shape::kColumnTiles + j, acc[i][j], even[i][j]);
  }
  __device__ __forceinline__ float4& level(int l, int i) const {
    return levels[(l * Shape::kWaiting + i) * Shape::kThreads];
  }
  static __device__ __forceinline__ float4 pair(float (&a)[4], float (&e)[4]) {
    return {e[0] + a[0], e[1] + a[1], e[2] + a[2], e[3] + a[3]};
  }
  static __device__ __forceinline__ float4 add(float4 x, float4 y) {
    return {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w};
  }
};

}  // namespace tile_detail

// acc = the tile's tree8 sums, or with kSegmentCount = 1 the sums of one segment, which then is a multiple of kTileStep
// long and begins at that many steps. x_row(r) gives the row of x that row r of the tile takes, w_row(c) the row of the
// weights that column c takes, both negative outside. `shared` has Shape::kSharedBytes (kStagesBytes for one segment).
// All threads take part.
template <typename Shape, Kind kKind, int kSegmentCount = 8, typename XRow, typename WRow>
__device__ __forceinline__ void multiply_tile(unsigned char* shared, int inner, const uint16_t* x, XRow x_row,
                                              TileWeights w, WRow w_row, TileSums<Shape>& acc, int first_step = 0) {
  static_assert(kSegmentCount == 8 || kSegmentCount == 1);
  constexpr int kParts = Shape::kRows * kTileChunks / Shape::kThreads;
  constexpr int kColumnsAt = Shape::kRows * kTileRowBytes;  // B after A in every stage
  static_assert(kParts * Shape::kThreads == Shape::kRows * kTileChunks, "the threads share the copies evenly");
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t base = ptx::shared_address(shared);

  int row[kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) row[i] = x_row((threadIdx.x + i * Shape::kThreads) / kTileChunks);
  tile_detail::WeightLoader<Shape, kKind> weights;
  weights.begin(w_row);
  const auto fetch = [&](int step, int stage) {
    const int k = first_step + step;
    const uint32_t tile = base + stage * Shape::kStageBytes;
#pragma unroll
    for (int i = 0; i < kParts; ++i)
      ptx::copy16(tile + tile_detail::part_offset<Shape>(i),
                  reinterpret_cast<const uint8_t*>(x) +
                      tile_detail::operand_offset(row[i], inner, k, threadIdx.x % kTileChunks),
                  row[i] >= 0);
    weights.fetch(w, inner, k, tile + kColumnsAt);
  };

  const int a_row = warp / Shape::kWarpsAcross * Shape::kWarpRows + (lane & 15);
  const int b_row = warp % Shape::kWarpsAcross * Shape::kWarpColumns + (lane & 7) + ((lane >> 4) << 3);
  const uint32_t a_at = tile_offset(a_row, lane >> 4), b_at = kColumnsAt + tile_offset(b_row, (lane >> 3) & 1);

  tile_detail::Fold<Shape> fold;
  fold.levels = reinterpret_cast<float4*>(shared + Shape::kStagesBytes) + threadIdx.x;

  const int blocks_per_segment = inner / 128, steps = kSegmentCount * blocks_per_segment * 16 / kTileStep;
  for (int k = 0; k < Shape::kStages - 1; ++k) {
    if (k < steps) {
      fetch(k, k);
      weights.finish(shared + k * Shape::kStageBytes + kColumnsAt);
    }
    ptx::commit_copies();
  }
  const auto previous = [](int stage) { return stage == 0 ? Shape::kStages - 1 : stage - 1; };
  // Stages and segments end independently of each other; both are multiples of a block of 16.
  int step = -1, stage = Shape::kStages - 1, block = kTileStep / 16 - 1;
#pragma unroll 1
  for (int segment = 0; segment < kSegmentCount; ++segment) {
#pragma unroll
    for (int i = 0; i < Shape::kRowTiles; ++i)
#pragma unroll
      for (int j = 0; j < Shape::kColumnTiles; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r) acc[i][j][r] = 0.0f;
#pragma unroll 1
    for (int n = 0; n < blocks_per_segment; ++n) {
      if (++block == kTileStep / 16) {
        block = 0;
        if (step >= 0 && step + Shape::kStages - 1 < steps)
          weights.finish(shared + previous(stage) * Shape::kStageBytes + kColumnsAt);
        ++step;
        stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
        ptx::wait_copies<Shape::kStages - 2>();
        __syncthreads();
        // Everybody is past the previous stage, which takes the newest fetch.
        if (step + Shape::kStages - 1 < steps) fetch(step + Shape::kStages - 1, previous(stage));
        ptx::commit_copies();
      }
      const uint32_t tile = base + stage * Shape::kStageBytes;
      uint32_t a_fragment[Shape::kRowTiles][4], b_fragment[Shape::kColumnTiles / 2][4];
      // A block of 16 is two chunks, so the block's number flips bits 5 and 6 of the swizzled offset.
#pragma unroll
      for (int i = 0; i < Shape::kRowTiles; ++i)
        ptx::ldmatrix_x4(a_fragment[i], tile + (a_at ^ (block << 5)) + i * 16 * kTileRowBytes);
#pragma unroll
      for (int j = 0; j < Shape::kColumnTiles / 2; ++j)
        ptx::ldmatrix_x4(b_fragment[j], tile + (b_at ^ (block << 5)) + j * 16 * kTileRowBytes);
#pragma unroll
      for (int i = 0; i < Shape::kRowTiles; ++i)
#pragma unroll
        for (int j = 0; j < Shape::kColumnTiles; ++j) {
          const uint32_t operand[2] = {b_fragment[j / 2][j % 2 * 2], b_fragment[j / 2][j % 2 * 2 + 1]};
          if constexpr (kKind == Kind::kW4A4) {
            float term[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            ptx::mma_bf16(term, a_fragment[i], operand);
#pragma unroll
            for (int r = 0; r < 4; ++r) acc[i][j][r] = acc[i][j][r] + term[r];
          } else {
            ptx::mma_bf16(acc[i][j], a_fragment[i], operand);
          }
        }
    }
    if constexpr (kSegmentCount > 1) fold.end_segment(segment, acc);
  }
}

// This thread's results are at rows tile_row + 16 i + 8 h and columns tile_column + 8 j and the next: acc[i][j][2 h]
// and acc[i][j][2 h + 1].
template <typename Shape>
__device__ __forceinline__ int tile_row() {
  return threadIdx.x / 32 / Shape::kWarpsAcross * Shape::kWarpRows + threadIdx.x % 32 / 4;
}
template <typename Shape>
__device__ __forceinline__ int tile_column() {
  return threadIdx.x / 32 % Shape::kWarpsAcross * Shape::kWarpColumns + threadIdx.x % 4 * 2;
}

}  // namespace muse
