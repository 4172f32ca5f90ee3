#include "ffi/numerics/reduce.cuh"
#include "ffi/ops/launch.cuh"
#include "ffi/ops/router/router.h"

namespace muse {
namespace {

// logits of kRows rows and kExperts experts per block; thread 16 s + j holds accumulator j of segment s of all of them.
template <int kRows, int kExperts>
__global__ void __launch_bounds__(kRowThreads)
    logits_kernel(Router op, const uint16_t* h, const float* w, float* logits) {
  constexpr int kDots = kRows * kExperts;
  static_assert(kDots <= kRowThreads, "one thread finishes one dot product");
  __shared__ float pairs[kDots][4];
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kRows;
  const int64_t first_expert = static_cast<int64_t>(blockIdx.x) * kExperts;
  const int64_t segment = op.hidden / kSegments, begin = threadIdx.x / kLanes * segment + threadIdx.x % kLanes;
  const uint16_t* x[kRows];
  const float* y[kExperts];
  // Past the edge the last row or expert is computed again.
#pragma unroll
  for (int t = 0; t < kRows; ++t)
    x[t] = h + (first_row + t < op.rows ? first_row + t : op.rows - 1) * op.hidden + begin;
#pragma unroll
  for (int e = 0; e < kExperts; ++e)
    y[e] = w + (first_expert + e < op.experts ? first_expert + e : op.experts - 1) * op.hidden + begin;
  float lane[kRows][kExperts] = {};
#pragma unroll 1
  for (int64_t i = 0; i < segment; i += kLanes) {
    float row[kRows], expert[kExperts];
#pragma unroll
    for (int t = 0; t < kRows; ++t) row[t] = from_bf16(x[t][i]);
#pragma unroll
    for (int e = 0; e < kExperts; ++e) expert[e] = y[e][i];
#pragma unroll
    for (int t = 0; t < kRows; ++t)
#pragma unroll
      for (int e = 0; e < kExperts; ++e) lane[t][e] = fma1(row[t], expert[e], lane[t][e]);
  }
#pragma unroll
  for (int t = 0; t < kRows; ++t)
#pragma unroll
    for (int e = 0; e < kExperts; ++e) {
      const float sum = fold_half_warp(lane[t][e]), pair = sum + __shfl_xor_sync(kFullWarp, sum, kLanes);
      if (threadIdx.x % 32 == 0) pairs[t * kExperts + e][threadIdx.x / 32] = pair;
    }
  __syncthreads();
  if (threadIdx.x >= kDots) return;
  const int64_t row = first_row + threadIdx.x / kExperts, expert = first_expert + threadIdx.x % kExperts;
  if (row >= op.rows || expert >= op.experts) return;
  const float* p = pairs[threadIdx.x];
  logits[row * op.experts + expert] = canonical(((p[0] + p[1]) + (p[2] + p[3])) * op.multiplier);
}

// An integer that orders keys: NaN below all numbers, and among equal keys the lower expert first.
__device__ __forceinline__ uint64_t rank_of(float key, uint32_t expert) {
  const uint32_t u = bit_cast<uint32_t>(key == 0.0f ? 0.0f : key);  // -0 equals +0
  const uint32_t ordered = is_nan(key) ? 0u : u >> 31 ? ~u : u | 0x80000000u;
  return static_cast<uint64_t>(ordered) << 32 | (0xFFFFFFFFu - expert);
}

constexpr int kChoiceWarps = 4;

// One warp per row; dynamic shared memory holds one rank per warp and expert.
__global__ void __launch_bounds__(32 * kChoiceWarps)
    choose_kernel(Router op, const float* bias, const float* logits, int32_t* experts, float* weights) {
  extern __shared__ uint64_t ranks[];
  __shared__ float by_id[kChoiceWarps][kRouterMaxSlots];
  __shared__ int32_t chosen[kChoiceWarps][kRouterMaxSlots];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int count = static_cast<int>(op.experts), slots = static_cast<int>(op.slots);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kChoiceWarps + warp;
  if (row >= op.rows) return;
  const float* l = logits + row * op.experts;
  uint64_t* mine = ranks + warp * count;
  for (int e = lane; e < count; e += 32) mine[e] = rank_of(sigmoid(l[e]) + bias[e], e);
  __syncwarp();
  uint64_t last = ~uint64_t{0};
  for (int k = 0; k < slots; ++k) {
    uint64_t best = 0;  // below every rank, as expert ids are below 2^32 - 1
    for (int e = lane; e < count; e += 32) best = mine[e] < last && mine[e] > best ? mine[e] : best;
    for (int width = 16; width > 0; width /= 2) {
      const uint64_t other = __shfl_xor_sync(kFullWarp, best, width);
      best = other > best ? other : best;
    }
    last = best;
    if (lane == 0) chosen[warp][k] = static_cast<int32_t>(0xFFFFFFFFu - static_cast<uint32_t>(best));
  }
  __syncwarp();
  for (int k = lane; k < slots; k += 32) {
    const int32_t id = chosen[warp][k];
    int place = 0;
    for (int other = 0; other < slots; ++other) place += chosen[warp][other] < id;
    by_id[warp][place] = sigmoid(l[id]);
  }
  __syncwarp();
  float sum = 0.0f;
  for (int k = 0; k < slots; ++k) sum = sum + by_id[warp][k];
  for (int k = lane; k < slots; k += 32) {
    const int32_t id = chosen[warp][k];
    experts[row * slots + k] = id;
    weights[row * slots + k] = canonical(sigmoid(l[id]) / (sum + 1e-15f) * op.scaling);
  }
}

template <int kRows, int kExperts>
void launch_logits(Stream stream, const Router& op, const uint16_t* h, const float* w, float* logits) {
  const dim3 grid(blocks_for(op.experts, kExperts), blocks_for(op.rows, kRows));
  logits_kernel<kRows, kExperts><<<grid, kRowThreads, 0, cuda_stream(stream)>>>(op, h, w, logits);
}

}  // namespace

Status router(Stream stream, Router op, const uint16_t* h, const float* w, const float* bias, int32_t* experts,
              float* weights, float* logits) {
  const char* name = "router";
  if (op.rows == 0) return {};
  constexpr int64_t kMaxBlocksAlongRows = 65535;
  if (op.rows > 8 * kMaxBlocksAlongRows) return {"router: more than 524280 rows in one call"};
  const int64_t bytes = kChoiceWarps * op.experts * static_cast<int64_t>(sizeof(uint64_t));
  if (const Status status = allow_shared(name, choose_kernel, bytes); !status.ok()) return status;
  if (op.rows < 64)
    launch_logits<2, 4>(stream, op, h, w, logits);
  else
    launch_logits<8, 8>(stream, op, h, w, logits);
  choose_kernel<<<blocks_for(op.rows, kChoiceWarps), 32 * kChoiceWarps, bytes, cuda_stream(stream)>>>(op, bias, logits,
                                                                                                      experts, weights);
  return launched(name);
}

}  // namespace muse
