#include "ffi/ops/launch.cuh"
#include "ffi/ops/rope/head.cuh"
#include "ffi/ops/rope/rope.h"

namespace muse {
namespace {

constexpr int kThreads = 256, kHeadsPerBlock = kThreads / kLanes;

// The half warp's head, or -1; the threads of an absent head still take part in exchanges.
__device__ __forceinline__ int64_t my_head(const NormRope& op) {
  const int64_t head = static_cast<int64_t>(blockIdx.x) * kHeadsPerBlock + threadIdx.x / kLanes;
  return head < op.rows * op.heads ? head : -1;
}

// Norm and rotation of a head; result as bf16 bits, in the same places.
__device__ __forceinline__ void norm_rope(const NormRope& op, int64_t head, const uint16_t* x, const float* table,
                                          uint16_t (&y)[kHeadTerms]) {
  const int j = threadIdx.x % kLanes;
  float value[kHeadTerms];
#pragma unroll
  for (int i = 0; i < kHeadTerms; ++i) value[i] = head < 0 ? 0.0f : from_bf16(x[head * kHead + j + i * kLanes]);
  const float r = inverse_rms(head_sumsq(value), kHead, op.eps);
  const float* cos = table + (head < 0 ? 0 : head / op.heads) * kHead;
#pragma unroll
  for (int i = 0; i < kHeadTerms; ++i) {
    const float mine = round_bf16(value[i] * r), other = __shfl_xor_sync(kFullWarp, mine, 1);
    y[i] = to_bf16(mine);
    if (!op.rotate || head < 0) continue;
    const int pair = (j + i * kLanes) / 2;
    const float c = cos[pair], s = cos[kHead / 2 + pair];
    y[i] = to_bf16(j % 2 == 0 ? mine * c - other * s : other * s + mine * c);
  }
}

__global__ void __launch_bounds__(kThreads) q_kernel(NormRope op, const uint16_t* x, const float* table, uint16_t* y) {
  const int64_t head = my_head(op);
  uint16_t result[kHeadTerms];
  norm_rope(op, head, x, table, result);
  if (head < 0) return;
#pragma unroll
  for (int i = 0; i < kHeadTerms; ++i) y[head * kHead + threadIdx.x % kLanes + i * kLanes] = result[i];
}

__global__ void __launch_bounds__(kThreads) kv_kernel(NormRope op, const uint16_t* k, const uint16_t* v,
                                                      const float* table, uint16_t* k_cached, uint16_t* v_cached) {
  const int64_t head = my_head(op), at = head * kHead + threadIdx.x % kLanes;
  uint16_t keys[kHeadTerms], values[kHeadTerms];
  norm_rope(op, head, k, table, keys);
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kHeadTerms; ++i) {
    values[i] = head < 0 ? uint16_t{0} : v[at + i * kLanes];
    finite = finite && bf16_finite(keys[i]) && bf16_finite(values[i]);
  }
  const unsigned all = __ballot_sync(kFullWarp, finite) >> (threadIdx.x % 32 / kLanes * kLanes) & 0xFFFFu;
  if (head < 0) return;
#pragma unroll
  for (int i = 0; i < kHeadTerms; ++i) {
    k_cached[at + i * kLanes] = all == 0xFFFFu ? keys[i] : kNan16;
    v_cached[at + i * kLanes] = all == 0xFFFFu ? values[i] : uint16_t{0};
  }
}

}  // namespace

Status q_norm_rope(Stream stream, NormRope op, const uint16_t* x, const float* table, uint16_t* y) {
  if (op.rows * op.heads == 0) return {};
  q_kernel<<<blocks_for(op.rows * op.heads, kHeadsPerBlock), kThreads, 0, cuda_stream(stream)>>>(op, x, table, y);
  return launched("q_norm_rope");
}

Status kv_norm_rope(Stream stream, NormRope op, const uint16_t* k, const uint16_t* v, const float* table,
                    uint16_t* k_cached, uint16_t* v_cached) {
  if (op.rows * op.heads == 0) return {};
  kv_kernel<<<blocks_for(op.rows * op.heads, kHeadsPerBlock), kThreads, 0, cuda_stream(stream)>>>(op, k, v, table,
                                                                                                  k_cached, v_cached);
  return launched("kv_norm_rope");
}

}  // namespace muse
