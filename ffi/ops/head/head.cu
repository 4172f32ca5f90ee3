#include "ffi/numerics/reduce.cuh"
#include "ffi/ops/gemm/gemm.h"
#include "ffi/ops/head/head.h"
#include "ffi/ops/head/row.h"
#include "ffi/ops/launch.cuh"

namespace muse {
namespace {

constexpr int kThreads = 256;

__global__ void softcap_kernel(int64_t n, float multiplier, float cap, float* logits) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < n) logits[i] = softcap_logit(logits[i], multiplier, cap);
}

// One block per row.
__global__ void __launch_bounds__(kRowThreads)
    log_prob_kernel(int64_t vocabulary, const float* logits, const int32_t* token, float* result) {
  __shared__ float shared[4];
  const float* row = logits + blockIdx.x * vocabulary;
  const int64_t segment = vocabulary / kSegments;
  const float* mine = row + threadIdx.x / kLanes * segment;
  float lane = 0.0f;
#pragma unroll 4
  for (int64_t i = threadIdx.x % kLanes; i < segment; i += kLanes) lane = lane + exp1(mine[i]);
  const float sum = tree8_block(fold_half_warp(lane), shared);
  if (threadIdx.x != 0) return;
  const int64_t t = token[blockIdx.x];
  result[blockIdx.x] = t < 0 || t >= vocabulary ? nan32() : canonical(row[t] - log1(sum));
}

}  // namespace

Status head(Stream stream, Head op, const uint16_t* h, const uint16_t* w, float* logits) {
  const int64_t n = op.rows * op.vocabulary;
  if (n == 0) return {};
  if (const Status status = gemm(stream, {op.rows, op.vocabulary, op.hidden, false}, h, w, logits); !status.ok())
    return status;
  softcap_kernel<<<blocks_for(n, kThreads), kThreads, 0, cuda_stream(stream)>>>(n, op.multiplier, op.cap, logits);
  return launched("head");
}

Status log_prob(Stream stream, int64_t rows, int64_t vocabulary, const float* logits, const int32_t* token,
                float* result) {
  if (rows == 0) return {};
  log_prob_kernel<<<static_cast<unsigned>(rows), kRowThreads, 0, cuda_stream(stream)>>>(vocabulary, logits, token,
                                                                                        result);
  return launched("log_prob");
}

}  // namespace muse
