// Acceptance on a GPU in one launch: every block walks the trees for itself, which is quick, and then does its part of
// the moves. The rules are ffi/draft/cpu/accept.cc's.
#include "ffi/draft/accept.h"
#include "ffi/numerics/formats.h"
#include "ffi/ops/launch.cuh"

namespace muse {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kAtOnce = 16;  // rows that a warp reads before it writes

struct Walks {
  int32_t follows[kMaxTreeRows], child[kMaxTreeRows], path[kMaxTreeRows];
  int32_t length[kMaxTreeRows], end[kMaxTreeRows];  // by sequence
};

// By all threads of a block, a node each.
__device__ void walk(const AcceptCall& c, Walks& w) {
  const int width = static_cast<int>(c.width), nodes = static_cast<int>(c.batch) * width, i = threadIdx.x;
  const int b = i / width, node = i - b * width;
  const auto there = [&](int sequence, int n) { return c.active[sequence] && c.lengths[sequence] + n < c.capacity; };
  if (i < nodes) {
    w.follows[i] = c.nan[i] || !there(b, node) ? -1 : c.chosen[i];
    w.child[i] = width;
  }
  __syncthreads();
  if (i < nodes && node > 0) {  // the first child with the token that is wanted
    const int parent = c.parent[i];
    if (parent >= 0 && parent < node && c.token[i] == w.follows[b * width + parent])
      atomicMin(&w.child[b * width + parent], node);
  }
  __syncthreads();
  if (i < c.batch) {
    const int first = i * width;
    int end = 0;
    for (int n = 0; n < width && there(i, n); n = w.child[first + n]) w.path[first + end++] = n;
    for (int d = end; d < width; ++d) w.path[first + d] = 0;
    w.length[i] = c.lengths[i];
    w.end[i] = end;
  }
  __syncthreads();
}

// By all threads of one block.
__device__ void store(const AcceptCall& c, const Walks& w) {
  const int width = static_cast<int>(c.width), i = threadIdx.x;
  if (i < c.batch * width) {
    const int at = i / width * width + w.path[i];
    c.path[i] = w.path[i];
    c.follows[i] = w.follows[at];
    c.seen[i] = c.token[at];
  }
  if (i < c.batch) {
    const int end = w.end[i], last = i * width + w.path[i * width + max(end - 1, 0)];
    const bool ended = end > 0 && c.nan[last];
    c.ended[i] = ended;
    c.committed[i] = end;
    c.count[i] = end - ended;
    c.next[i] = end > 0 && !ended ? w.follows[last] : 0;
    c.grown[i] = w.length[i] + end;
  }
}

__global__ void __launch_bounds__(kThreads) accept_kernel(const __grid_constant__ AcceptCall c) {
  __shared__ Walks w;
  walk(c, w);
  if (blockIdx.x == 0) store(c, w);
  const int lane = threadIdx.x % 32, warp = blockIdx.x * kWarps + threadIdx.x / 32, warps = gridDim.x * kWarps;
  // A warp takes a head of a layer: its rows of 64 numbers, two a lane. No node is above its depth, so that rows may be
  // written while later ones are still to be read.
  int begin = 0;
#pragma unroll 1
  for (int which = 0; which < kCaches; ++which) {
    const int slots = static_cast<int>(c.slots[which]), heads = static_cast<int>(c.heads),
              units = static_cast<int>(c.ranks * c.layers[which] * c.batch) * heads;
#pragma unroll 1
    for (int unit = (warp + warps - begin % warps) % warps; unit < units; unit += warps) {
      const int b = unit / heads % static_cast<int>(c.batch), length = w.length[b], end = w.end[b];
      auto* rows = reinterpret_cast<uint32_t*>(c.cache[which]) + int64_t{unit} * slots * (kCacheRow / 2) + lane;
#pragma unroll 1
      for (int r0 = 1; r0 < end; r0 += kAtOnce) {
        uint32_t row[kAtOnce];
#pragma unroll
        for (int e = 0; e < kAtOnce; ++e)
          if (r0 + e < end)
            row[e] = rows[int64_t{(length + w.path[b * static_cast<int>(c.width) + r0 + e]) % slots} * (kCacheRow / 2)];
#pragma unroll
        for (int e = 0; e < kAtOnce; ++e)
          if (r0 + e < end) rows[int64_t{(length + r0 + e) % slots} * (kCacheRow / 2)] = row[e];
      }
    }
    begin += units;
  }
  if (!c.residuals) return;
  const int quads = static_cast<int>(c.hidden) / 4, taps = static_cast<int>(c.taps), nodes = c.batch * c.width;
#pragma unroll 1
  for (int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x; at < int64_t{nodes} * taps * quads;
       at += int64_t{gridDim.x} * kThreads) {
    const int row = static_cast<int>(at / quads), i = row / taps, e = row - i * taps, j = static_cast<int>(at % quads);
    const int from = i / static_cast<int>(c.width) * static_cast<int>(c.width) + w.path[i];
    const float4 x =
        reinterpret_cast<const float4*>(c.residuals)[(int64_t{2 * c.tap[e] + 1} * nodes + from) * quads + j];
    const auto two = [](float low, float high) {
      return static_cast<uint32_t>(to_bf16(low)) | static_cast<uint32_t>(to_bf16(high)) << 16;
    };
    reinterpret_cast<uint2*>(c.features)[at] = {two(x.x, x.y), two(x.z, x.w)};
  }
}

}  // namespace

Status accept(Stream stream, const AcceptCall& call) {
  int device = 0, multiprocessors = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (e != cudaSuccess) return cuda_status("accept", e);
  return cuda_status("accept", launch_kernel(accept_kernel, 4 * multiprocessors, kThreads, 0, stream, call));
}

}  // namespace muse
