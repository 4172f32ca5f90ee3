#include "ffi/numerics/reduce.cuh"
#include "ffi/ops/combine/combine.h"
#include "ffi/ops/combine/row.h"
#include "ffi/ops/launch.cuh"
#include "ffi/ops/norm/row.h"

namespace muse {
namespace {

// One block per row.
__global__ void __launch_bounds__(kRowThreads)
    combine_kernel(Combine op, const uint16_t* f, const float* weights, const int32_t* experts, const uint16_t* gain,
                   uint16_t* x) {
  __shared__ float shared[4], c[kMaxSlots], rho[kMaxSlots];
  __shared__ int32_t order[kMaxSlots];
  const int64_t row = blockIdx.x, n = op.columns, segment = n / kSegments;
  const int slots = static_cast<int>(op.slots);
  const auto z = [&](int k, int64_t i) {
    return from_bf16(f[(row * slots + k) * n + i]) * from_bf16(effective_gain(gain[i]));
  };
  for (int k = threadIdx.x; k < slots; k += kRowThreads) {
    const int32_t* ids = experts + row * slots;
    int place = 0;  // in ascending id, equal ids by slot
    for (int other = 0; other < slots; ++other) place += ids[other] < ids[k] || (ids[other] == ids[k] && other < k);
    order[place] = k;
    c[k] = weights[row * slots + k];
  }
  const int64_t end = (threadIdx.x / kLanes + 1) * segment;
  for (int k = 0; k < slots; ++k) {
    float lane = 0.0f;
#pragma unroll 8
    for (int64_t i = end - segment + threadIdx.x % kLanes; i < end; i += kLanes) {
      const float value = z(k, i);
      lane = fma1(value, value, lane);
    }
    const float r = inverse_rms(tree8_block(fold_half_warp(lane), shared), n, op.eps);
    if (threadIdx.x == 0) rho[k] = r;
  }
  __syncthreads();
  for (int64_t i = threadIdx.x; i < n; i += kRowThreads) {
    float sum = 0.0f;
    for (int k = 0; k < slots; ++k) {
      const int slot = order[k];
      sum = fma1(c[slot], z(slot, i) * rho[slot], sum);
    }
    x[row * n + i] = to_bf16(sum);
  }
}

}  // namespace

Status combine(Stream stream, Combine op, const uint16_t* f, const float* weights, const int32_t* experts,
               const uint16_t* gain, uint16_t* x) {
  if (op.rows == 0) return {};
  combine_kernel<<<static_cast<unsigned>(op.rows), kRowThreads, 0, cuda_stream(stream)>>>(op, f, weights, experts, gain,
                                                                                          x);
  return launched("combine");
}

}  // namespace muse
