#include "ffi/numerics/reduce.cuh"
#include "ffi/ops/launch.cuh"
#include "ffi/ops/norm/norm.h"
#include "ffi/ops/norm/row.h"

namespace muse {
namespace {

enum class Input { kBf16, kFp32, kFp32Rounded };

template <Input kInput>
__device__ __forceinline__ float load(const void* x, int64_t at) {
  if constexpr (kInput == Input::kBf16) return from_bf16(static_cast<const uint16_t*>(x)[at]);
  const float value = static_cast<const float*>(x)[at];
  return kInput == Input::kFp32 ? value : round_bf16(value);
}

// One block per row.
template <Input kInput, bool kScaleFirst>
__global__ void __launch_bounds__(kRowThreads)
    norm_kernel(RmsNorm op, const void* x, const uint16_t* gain, uint16_t* y) {
  __shared__ float shared[4];
  const int64_t n = op.columns, row = blockIdx.x * n, segment = n / kSegments;
  const auto g = [&](int64_t i) { return from_bf16(op.centred ? effective_gain(gain[i]) : gain[i]); };
  const auto z = [&](int64_t i) {
    const float value = load<kInput>(x, row + i);
    return kScaleFirst ? round_bf16(value * g(i)) : value;
  };
  float lane = 0.0f;
  const int64_t end = (threadIdx.x / kLanes + 1) * segment;
#pragma unroll 8
  for (int64_t i = end - segment + threadIdx.x % kLanes; i < end; i += kLanes) {
    const float value = z(i);
    lane = fma1(value, value, lane);
  }
  const float r = inverse_rms(tree8_block(fold_half_warp(lane), shared), n, op.eps);
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < n; i += kRowThreads) {
    const float scaled = z(i) * r;
    y[row + i] = to_bf16(!kScaleFirst && gain ? scaled * g(i) : scaled);
  }
}

template <Input kInput, bool kScaleFirst>
void launch(Stream stream, const RmsNorm& op, const void* x, const uint16_t* gain, uint16_t* y) {
  norm_kernel<kInput, kScaleFirst>
      <<<static_cast<unsigned>(op.rows), kRowThreads, 0, cuda_stream(stream)>>>(op, x, gain, y);
}

}  // namespace

Status rms_norm(Stream stream, RmsNorm op, const void* x, const uint16_t* gain, uint16_t* y) {
  if (op.rows == 0) return {};
  if (op.scale_first)
    launch<Input::kBf16, true>(stream, op, x, gain, y);
  else if (!op.fp32_input)
    launch<Input::kBf16, false>(stream, op, x, gain, y);
  else if (op.round_input)
    launch<Input::kFp32Rounded, false>(stream, op, x, gain, y);
  else
    launch<Input::kFp32, false>(stream, op, x, gain, y);
  return launched("rms_norm");
}

}  // namespace muse
