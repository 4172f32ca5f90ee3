#include <algorithm>

#include "ffi/ops/experts/experts.h"
#include "ffi/ops/experts/row.h"
#include "ffi/ops/gemm/tile.cuh"
#include "ffi/ops/launch.cuh"

namespace muse {
namespace {

// The (token, slot) pairs of local experts, sorted by expert, and the tiles of rows that they make. Everything here is
// found on the device; the host only knows upper bounds.
struct Tile {
  int32_t expert, begin, end;  // local expert, range of sorted pairs
};

struct Groups {
  int32_t* pairs;   // sorted: token * slots + slot
  Tile* tiles;      // of at most Shape::kRows pairs of one expert
  int32_t* totals;  // number of pairs, number of tiles
};

constexpr int kGroupThreads = 1024;

// One block. The order of the pairs inside an expert is arbitrary: rows never interact. `next` is dynamic shared memory
// with one number per local expert.
__global__ void __launch_bounds__(kGroupThreads)
    group_pairs(ExpertFfn op, int tile_rows, const int32_t* experts, const int32_t* first, Groups groups) {
  extern __shared__ int32_t next[];
  __shared__ int32_t pair_sums[kGroupThreads], tile_sums[kGroupThreads];
  const int thread = threadIdx.x, local = static_cast<int>(op.local), pairs = static_cast<int>(op.tokens * op.slots);
  const int32_t base = *first;
  for (int e = thread; e < local; e += kGroupThreads) next[e] = 0;
  __syncthreads();
  for (int p = thread; p < pairs; p += kGroupThreads) {
    const int64_t e = static_cast<int64_t>(experts[p]) - base;
    if (e >= 0 && e < local) atomicAdd(&next[e], 1);
  }
  int32_t pairs_before = 0, tiles_before = 0;  // of earlier rounds of experts
  for (int start = 0; start < local; start += kGroupThreads) {
    __syncthreads();
    const int e = start + thread;
    const int32_t count = e < local ? next[e] : 0, tiles = (count + tile_rows - 1) / tile_rows;
    pair_sums[thread] = count;
    tile_sums[thread] = tiles;
    for (int width = 1; width < kGroupThreads; width *= 2) {  // inclusive prefix sums
      __syncthreads();
      const int32_t p = thread >= width ? pair_sums[thread - width] : 0,
                    t = thread >= width ? tile_sums[thread - width] : 0;
      __syncthreads();
      pair_sums[thread] += p;
      tile_sums[thread] += t;
    }
    const int32_t begin = pairs_before + pair_sums[thread] - count,
                  first_tile = tiles_before + tile_sums[thread] - tiles;
    for (int32_t i = 0; i < tiles; ++i) {
      const int32_t end = begin + (i + 1) * tile_rows;
      groups.tiles[first_tile + i] = {e, begin + i * tile_rows, end < begin + count ? end : begin + count};
    }
    if (e < local) next[e] = begin;
    __syncthreads();
    pairs_before += pair_sums[kGroupThreads - 1];
    tiles_before += tile_sums[kGroupThreads - 1];
  }
  __syncthreads();
  for (int p = thread; p < pairs; p += kGroupThreads) {
    const int64_t e = static_cast<int64_t>(experts[p]) - base;
    if (e >= 0 && e < local) groups.pairs[atomicAdd(&next[e], 1)] = p;
  }
  if (thread == 0) {
    groups.totals[0] = pairs_before;
    groups.totals[1] = tiles_before;
  }
}

// What a sum over an expert's rows is multiplied by.
struct Scales {
  const float *weight, *input;  // weight_scale_2; input_scale for W4A4
};

template <Kind kKind>
__device__ __forceinline__ float finish(float sum, Scales s, int64_t index) {
  if constexpr (kKind == Kind::kBf16) return canonical(sum);
  const float scale = kKind == Kind::kW4A16 ? s.weight[index] : s.weight[index] * *s.input;
  return canonical(sum * scale);
}

// m [sorted pairs, intermediate]. A warp's columns are gate and up of the same elements, half and half.
template <typename Shape, Kind kKind>
__global__ void __launch_bounds__(Shape::kThreads)
    gate_up_kernel(ExpertFfn op, Groups groups, const uint16_t* x, TileWeights w13, Scales scales, uint16_t* m) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr int kWidth = Shape::kColumns / 2, kHalf = Shape::kWarpColumns / 2, kPairTiles = Shape::kColumnTiles / 2;
  const int across = static_cast<int>(op.intermediate) / kWidth, index = blockIdx.x / across;
  if (index >= groups.totals[1]) return;
  const Tile tile = groups.tiles[index];
  const int first_column = static_cast<int>(blockIdx.x % across) * kWidth;
  const int slots = static_cast<int>(op.slots), intermediate = static_cast<int>(op.intermediate);
  TileSums<Shape> acc;
  multiply_tile<Shape, kKind>(
      shared, static_cast<int>(op.model), x,
      [&](int r) { return tile.begin + r < tile.end ? groups.pairs[tile.begin + r] / slots : -1; }, w13,
      [&](int c) {
        const int inside = c % Shape::kWarpColumns, up = inside / kHalf;
        return (2 * tile.expert + up) * intermediate + first_column + c / Shape::kWarpColumns * kHalf + inside % kHalf;
      },
      acc);
  const int warp_column = tile_column<Shape>() / Shape::kWarpColumns * kHalf + threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < Shape::kRowTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile.begin + tile_row<Shape>() + 16 * i + 8 * half;
      if (row >= tile.end) continue;
#pragma unroll
      for (int j = 0; j < kPairTiles; ++j) {
        uint16_t result[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float gate = finish<kKind>(acc[i][j][2 * half + r], scales, 2 * tile.expert);
          const float up = finish<kKind>(acc[i][j + kPairTiles][2 * half + r], scales, 2 * tile.expert + 1);
          swiglu_row(&gate, &up, 1, &result[r]);
        }
        *reinterpret_cast<ushort2*>(m + static_cast<int64_t>(row) * intermediate + first_column + warp_column +
                                    8 * j) = {result[0], result[1]};
      }
    }
}

// f [tokens, slots, model] from m.
template <typename Shape, Kind kKind>
__global__ void __launch_bounds__(Shape::kThreads)
    down_kernel(ExpertFfn op, Groups groups, const uint16_t* m, TileWeights w2, Scales scales, uint16_t* f) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int across = static_cast<int>(op.model) / Shape::kColumns, index = blockIdx.x / across;
  if (index >= groups.totals[1]) return;
  const Tile tile = groups.tiles[index];
  const int first_column = static_cast<int>(blockIdx.x % across) * Shape::kColumns, model = static_cast<int>(op.model);
  TileSums<Shape> acc;
  multiply_tile<Shape, kKind>(
      shared, static_cast<int>(op.intermediate), m,
      [&](int r) { return tile.begin + r < tile.end ? tile.begin + r : -1; }, w2,
      [&](int c) { return tile.expert * model + first_column + c; }, acc);
#pragma unroll
  for (int i = 0; i < Shape::kRowTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile.begin + tile_row<Shape>() + 16 * i + 8 * half;
      if (row >= tile.end) continue;
      uint16_t* out = f + static_cast<int64_t>(groups.pairs[row]) * model + first_column + tile_column<Shape>();
#pragma unroll
      for (int j = 0; j < Shape::kColumnTiles; ++j)
        *reinterpret_cast<ushort2*>(out + 8 * j) = {
            to_bf16(finish<kKind>(acc[i][j][2 * half], scales, tile.expert)),
            to_bf16(finish<kKind>(acc[i][j][2 * half + 1], scales, tile.expert))};
    }
}

constexpr int kQuantizeThreads = 128;

// Rows of bf16 -> what quantising makes of them, code * scale as bf16; out may be x. `rows` is a bound, *row_count
// (where given) the number.
__global__ void quantize_expand(int64_t rows, int blocks_per_row, const int32_t* row_count, const uint16_t* x,
                                const float* input_scale, uint16_t* out) {
  const int64_t b = static_cast<int64_t>(blockIdx.x) * kQuantizeThreads + threadIdx.x;
  if (b >= (row_count ? *row_count : rows) * blocks_per_row) return;
  uint4 words[2] = {reinterpret_cast<const uint4*>(x)[2 * b], reinterpret_cast<const uint4*>(x)[2 * b + 1]};
  uint16_t values[16];
  memcpy(values, words, sizeof(words));
  uint8_t codes[16];
  const float scale = from_e4m3(quantize_block(values, *input_scale, codes));
#pragma unroll
  for (int i = 0; i < 16; ++i) values[i] = to_bf16(from_e2m1(codes[i]) * scale);  // exact
  memcpy(words, values, sizeof(words));
  reinterpret_cast<uint4*>(out)[2 * b] = words[0];
  reinterpret_cast<uint4*>(out)[2 * b + 1] = words[1];
}

// One call's weights of either GEMM.
struct Stage {
  TileWeights weights;
  Scales scales;
};

template <typename Shape, Kind kKind>
Status run(Stream stream, const char* name, Scratch* scratch, const ExpertFfn& op, const uint16_t* x,
           const int32_t* experts, const int32_t* first, Stage gate_up, Stage down, uint16_t* f) {
  const cudaStream_t queue = cuda_stream(stream);
  const int64_t pairs = op.tokens * op.slots;
  const int64_t tiles = std::min(pairs, divide_up(pairs, Shape::kRows) + op.local);  // at most so many are not empty
  constexpr bool kQuantized = kKind == Kind::kW4A4;

  // One allocation, cut into aligned parts.
  const int64_t sizes[] = {pairs * 4, tiles * static_cast<int64_t>(sizeof(Tile)), 8, pairs * op.intermediate * 2,
                           kQuantized ? op.tokens * op.model * 2 : 0};
  int64_t total = 0;
  for (const int64_t size : sizes) total += divide_up(size, 256) * 256;
  auto* next = static_cast<unsigned char*>(scratch->allocate(total));
  if (!next) return no_memory(name, total);
  const auto take = [&](int part) {
    unsigned char* here = next;
    next += divide_up(sizes[part], 256) * 256;
    return here;
  };
  Groups groups{};
  groups.pairs = reinterpret_cast<int32_t*>(take(0));
  groups.tiles = reinterpret_cast<Tile*>(take(1));
  groups.totals = reinterpret_cast<int32_t*>(take(2));
  auto* m = reinterpret_cast<uint16_t*>(take(3));
  auto* expanded = reinterpret_cast<uint16_t*>(take(4));

  for (const Status& status : {allow_shared(name, group_pairs, op.local * 4),
                               allow_shared(name, gate_up_kernel<Shape, kKind>, Shape::kSharedBytes),
                               allow_shared(name, down_kernel<Shape, kKind>, Shape::kSharedBytes),
                               cuda_status(name, cudaMemsetAsync(f, 0, pairs * op.model * 2, queue))})
    if (!status.ok()) return status;
  group_pairs<<<1, kGroupThreads, op.local * 4, queue>>>(op, Shape::kRows, experts, first, groups);
  const auto quantize = [&](int64_t rows, int64_t columns, const int32_t* count, const uint16_t* from,
                            const float* scale, uint16_t* to) {
    quantize_expand<<<blocks_for(rows * columns / 16, kQuantizeThreads), kQuantizeThreads, 0, queue>>>(
        rows, static_cast<int>(columns / 16), count, from, scale, to);
  };
  if (kQuantized) quantize(op.tokens, op.model, nullptr, x, gate_up.scales.input, expanded);
  gate_up_kernel<Shape, kKind>
      <<<static_cast<unsigned>(tiles * (op.intermediate / (Shape::kColumns / 2))), Shape::kThreads, Shape::kSharedBytes,
         queue>>>(op, groups, kQuantized ? expanded : x, gate_up.weights, gate_up.scales, m);
  if (kQuantized) quantize(pairs, op.intermediate, groups.totals, m, down.scales.input, m);
  down_kernel<Shape, kKind>
      <<<static_cast<unsigned>(tiles * (op.model / Shape::kColumns)), Shape::kThreads, Shape::kSharedBytes, queue>>>(
          op, groups, m, down.weights, down.scales, f);
  return launched(name);
}

template <Kind kKind>
Status run(Stream stream, const char* name, Scratch* scratch, const ExpertFfn& op, const uint16_t* x,
           const int32_t* experts, const int32_t* first, Stage gate_up, Stage down, uint16_t* f) {
  const int64_t pairs = op.tokens * op.slots;
  if (pairs == 0) return {};
  if (op.local == 0) return cuda_status(name, cudaMemsetAsync(f, 0, pairs * op.model * 2, cuda_stream(stream)));
  // How many rows an expert has is known on the device only; this is their mean if all chosen experts are local.
  const int64_t mean = pairs / op.local;
  const auto call = [&](auto shape) {
    return run<decltype(shape), kKind>(stream, name, scratch, op, x, experts, first, gate_up, down, f);
  };
  return mean <= SmallTile::kRows    ? call(SmallTile{})
         : mean <= MediumTile::kRows ? call(MediumTile{})
                                     : call(LargeTile{});
}

}  // namespace

Status expert_ffn(Stream stream, Scratch* scratch, ExpertFfn op, const uint16_t* x, const int32_t* experts,
                  const int32_t* first, const uint16_t* w13, const uint16_t* w2, uint16_t* f) {
  return run<Kind::kBf16>(stream, "expert_ffn", scratch, op, x, experts, first, {{w13, nullptr}, {}},
                          {{w2, nullptr}, {}}, f);
}

Status expert_ffn_nvfp4(Stream stream, Scratch* scratch, ExpertFfn op, const uint16_t* x, const int32_t* experts,
                        const int32_t* first, Nvfp4Experts w, uint16_t* f) {
  const Stage gate_up{{w.w13.codes, w.w13.scales}, {w.w13_scale_2, w.input_scales}};
  const Stage down{{w.w2.codes, w.w2.scales}, {w.w2_scale_2, w.input_scales + 1}};
  const char* name = "expert_ffn_nvfp4";
  return w.quantize_activations ? run<Kind::kW4A4>(stream, name, scratch, op, x, experts, first, gate_up, down, f)
                                : run<Kind::kW4A16>(stream, name, scratch, op, x, experts, first, gate_up, down, f);
}

}  // namespace muse
