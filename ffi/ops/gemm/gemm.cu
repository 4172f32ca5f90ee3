#include <cooperative_groups.h>

#include "ffi/numerics/reduce.h"
#include "ffi/ops/gemm/gemm.h"
#include "ffi/ops/gemm/tile.cuh"
#include "ffi/ops/launch.cuh"

namespace muse {
namespace {

// What the sums are multiplied by, if anything: the product of one or two numbers.
struct ResultScale {
  const float *first, *second;
};

// Blocks that run together take a nearly square piece of the result, so that they share rows and weights in the L2.
constexpr int64_t kBand = 8;  // row tiles per band

__device__ __forceinline__ void tile_position(int64_t index, int64_t row_tiles, int64_t column_tiles, int64_t& row,
                                              int64_t& column) {
  const int64_t band = index / (kBand * column_tiles), inside = index % (kBand * column_tiles);
  const int64_t left = row_tiles - band * kBand, height = left < kBand ? left : kBand;
  row = band * kBand + inside % height;
  column = inside / height;
}

constexpr int kExpandThreads = 256;

// out = code * scale, for `blocks` blocks of sixteen activations.
__global__ void expand_kernel(int64_t blocks, Nvfp4 x, uint16_t* out) {
  const int64_t b = static_cast<int64_t>(blockIdx.x) * kExpandThreads + threadIdx.x;
  if (b >= blocks) return;
  uint4 operands[2];
  expand_block(*reinterpret_cast<const uint2*>(x.codes + 8 * b), x.scales[b], operands);
  reinterpret_cast<uint4*>(out)[2 * b] = operands[0];
  reinterpret_cast<uint4*>(out)[2 * b + 1] = operands[1];
}

template <Kind kKind>
__device__ __forceinline__ void store(const GemmShape& s, ResultScale scale, int64_t row, int64_t column, float sum,
                                      void* y) {
  if (row >= s.rows || column >= s.columns) return;
  if (kKind == Kind::kW4A16) sum = sum * *scale.first;
  if (kKind == Kind::kW4A4) sum = sum * (*scale.first * *scale.second);
  const int64_t at = row * s.columns + column;
  if (s.bf16_result)
    static_cast<uint16_t*>(y)[at] = to_bf16(sum);
  else
    static_cast<float*>(y)[at] = canonical(sum);
}

template <typename Shape, Kind kKind, int kSegmentCount>
__device__ __forceinline__ void multiply(const GemmShape& s, const uint16_t* x, TileWeights w, unsigned char* shared,
                                         int64_t index, int first_step, int64_t& first_row, int64_t& first_column,
                                         TileSums<Shape>& acc) {
  tile_position(index, (s.rows + Shape::kRows - 1) / Shape::kRows, (s.columns + Shape::kColumns - 1) / Shape::kColumns,
                first_row, first_column);
  first_row *= Shape::kRows;
  first_column *= Shape::kColumns;
  multiply_tile<Shape, kKind, kSegmentCount>(
      shared, static_cast<int>(s.inner), x,
      [&](int r) { return first_row + r < s.rows ? static_cast<int>(first_row) + r : -1; }, w,
      [&](int c) { return first_column + c < s.columns ? static_cast<int>(first_column) + c : -1; }, acc, first_step);
}

// One block per tile.
template <typename Shape, Kind kKind>
__global__ void __launch_bounds__(Shape::kThreads)
    gemm_kernel(GemmShape s, const uint16_t* x, TileWeights w, ResultScale scale, void* y) {
  extern __shared__ __align__(128) unsigned char shared[];
  int64_t first_row, first_column;
  TileSums<Shape> acc;
  multiply<Shape, kKind, 8>(s, x, w, shared, blockIdx.x, 0, first_row, first_column, acc);
#pragma unroll
  for (int i = 0; i < Shape::kRowTiles; ++i)
#pragma unroll
    for (int j = 0; j < Shape::kColumnTiles; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r)
        store<kKind>(s, scale, first_row + tile_row<Shape>() + 16 * i + 8 * (r / 2),
                     first_column + tile_column<Shape>() + 8 * j + r % 2, acc[i][j][r], y);
}

// One cluster of eight blocks per tile, one block per segment: for shapes with few tiles.
template <typename Shape, Kind kKind>
__global__ void __cluster_dims__(kSegments, 1, 1) __launch_bounds__(Shape::kThreads)
    split_kernel(GemmShape s, const uint16_t* x, TileWeights w, ResultScale scale, void* y) {
  extern __shared__ __align__(128) unsigned char shared[];
  static_assert(Shape::kStagesBytes >= Shape::kRows * Shape::kColumns * 4, "the sums take the stages' place");
  const auto cluster = cooperative_groups::this_cluster();
  const int segment = static_cast<int>(cluster.block_rank());
  int64_t first_row, first_column;
  TileSums<Shape> acc;
  multiply<Shape, kKind, 1>(s, x, w, shared, blockIdx.x / kSegments,
                            segment * static_cast<int>(s.inner / kSegments / kTileStep), first_row, first_column, acc);
  __syncthreads();
  float* sums = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int i = 0; i < Shape::kRowTiles; ++i)
#pragma unroll
    for (int j = 0; j < Shape::kColumnTiles; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r)
        sums[(tile_row<Shape>() + 16 * i + 8 * (r / 2)) * Shape::kColumns + tile_column<Shape>() + 8 * j + r % 2] =
            acc[i][j][r];
  cluster.sync();
  // Each block finishes an eighth of the tile.
  constexpr int kPart = Shape::kRows * Shape::kColumns / kSegments;
  for (int i = segment * kPart + static_cast<int>(threadIdx.x); i < (segment + 1) * kPart; i += Shape::kThreads) {
    float parts[kSegments];
#pragma unroll
    for (int p = 0; p < kSegments; ++p) parts[p] = cluster.map_shared_rank(sums, p)[i];
    store<kKind>(s, scale, first_row + i / Shape::kColumns, first_column + i % Shape::kColumns, tree8(parts), y);
  }
  cluster.sync();  // nobody leaves while its sums are read
}

template <typename Shape, Kind kKind>
Status launch(Stream stream, const char* op, const GemmShape& s, const uint16_t* x, TileWeights w, ResultScale scale,
              void* y) {
  int64_t blocks = divide_up(s.rows, Shape::kRows) * divide_up(s.columns, Shape::kColumns);
  auto kernel = gemm_kernel<Shape, kKind>;
  int bytes = Shape::kSharedBytes;
  // The smaller tiles serve shapes with few of them: where segments are whole stages, spread the segments.
  if constexpr (Shape::kRows < LargeTile::kRows)
    if (s.inner % (kSegments * kTileStep) == 0) {
      blocks *= kSegments;
      kernel = split_kernel<Shape, kKind>;
      bytes = Shape::kStagesBytes;
    }
  if (const Status status = allow_shared(op, kernel, bytes); !status.ok()) return status;
  kernel<<<static_cast<unsigned>(blocks), Shape::kThreads, bytes, cuda_stream(stream)>>>(s, x, w, scale, y);
  return launched(op);
}

template <Kind kKind>
Status run(Stream stream, const char* op, const GemmShape& s, const uint16_t* x, TileWeights w, ResultScale scale,
           void* y) {
  if (s.rows == 0 || s.columns == 0) return {};
  constexpr int64_t kProcessors = 128;  // about as many large tiles keep the device busy
  if (s.rows <= SmallTile::kRows) return launch<SmallTile, kKind>(stream, op, s, x, w, scale, y);
  if (divide_up(s.rows, LargeTile::kRows) * divide_up(s.columns, LargeTile::kColumns) < kProcessors)
    return launch<MediumTile, kKind>(stream, op, s, x, w, scale, y);
  return launch<LargeTile, kKind>(stream, op, s, x, w, scale, y);
}

}  // namespace

Status gemm(Stream stream, GemmShape s, const uint16_t* x, const uint16_t* w, void* y) {
  return run<Kind::kBf16>(stream, "gemm", s, x, {w, nullptr}, {}, y);
}

Status gemm_w4a16(Stream stream, GemmShape s, const uint16_t* x, Nvfp4 w, const float* weight_scale_2, void* y) {
  return run<Kind::kW4A16>(stream, "gemm_w4a16", s, x, {w.codes, w.scales}, {weight_scale_2, nullptr}, y);
}

Status gemm_w4a4(Stream stream, Scratch* scratch, GemmShape s, Nvfp4 x, Nvfp4 w, const float* weight_scale_2,
                 const float* input_scale, void* y) {
  const char* op = "gemm_w4a4";
  if (s.rows == 0 || s.columns == 0) return {};
  auto* expanded = static_cast<uint16_t*>(scratch->allocate(s.rows * s.inner * 2));
  if (!expanded) return no_memory(op, s.rows * s.inner * 2);
  const int64_t blocks = s.rows * s.inner / 16;
  expand_kernel<<<blocks_for(blocks, kExpandThreads), kExpandThreads, 0, cuda_stream(stream)>>>(blocks, x, expanded);
  return run<Kind::kW4A4>(stream, op, s, expanded, {w.codes, w.scales}, {weight_scale_2, input_scale}, y);
}

}  // namespace muse
