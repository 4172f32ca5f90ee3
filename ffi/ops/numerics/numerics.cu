#include <cuda_runtime.h>

#include "ffi/device/ptx.cuh"
#include "ffi/numerics/elementary.h"
#include "ffi/ops/numerics/numerics.h"

namespace muse {
namespace {

constexpr int kThreads = 256;

struct Inputs {
  const void* data[3];
};

__global__ void elementwise(Function function, int64_t n, Inputs inputs, void* result) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  const float* x = static_cast<const float*>(inputs.data[0]);
  const uint16_t* x16 = static_cast<const uint16_t*>(inputs.data[0]);
  const uint8_t* x8 = static_cast<const uint8_t*>(inputs.data[0]);
  float* y = static_cast<float*>(result);
  switch (function) {
    case Function::kExp:
      y[i] = canonical(exp1(x[i]));
      break;
    case Function::kSigmoid:
      y[i] = canonical(sigmoid(x[i]));
      break;
    case Function::kSilu:
      y[i] = canonical(silu(x[i]));
      break;
    case Function::kTanh:
      y[i] = canonical(tanh1(x[i]));
      break;
    case Function::kLog:
      y[i] = canonical(log1(x[i]));
      break;
    case Function::kRsqrt:
      y[i] = canonical(rsqrt1(x[i]));
      break;
    case Function::kFma: {
      const float *b = static_cast<const float*>(inputs.data[1]), *c = static_cast<const float*>(inputs.data[2]);
      y[i] = canonical(fma1(x[i], b[i], c[i]));
      break;
    }
    case Function::kToBf16:
      static_cast<uint16_t*>(result)[i] = to_bf16(x[i]);
      break;
    case Function::kFromBf16:
      y[i] = canonical(from_bf16(x16[i]));
      break;
    case Function::kFromFp16:
      y[i] = canonical(from_fp16(x16[i]));
      break;
    case Function::kToE4m3:
      static_cast<uint8_t*>(result)[i] = to_e4m3_sat(x[i]);
      break;
    case Function::kFromE4m3:
      y[i] = canonical(from_e4m3(x8[i]));
      break;
    case Function::kToE2m1:
      static_cast<uint8_t*>(result)[i] = static_cast<uint8_t>(to_e2m1_sat(x[i]));
      break;
    case Function::kFromE2m1:
      y[i] = from_e2m1(x8[i] & 15u);
      break;
    default:
      break;
  }
}

// A warp takes eight independent sums: A's row g and B's column g belong to sum g, and the diagonal of the 16 x 8
// result holds the answers.
template <Operand kKind>
__global__ void fsum16_diagonal(int64_t n, const float* acc, const uint16_t* a, const uint16_t* b, float* result) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32) * 8;
  if (first >= n) return;
  const int64_t mine = first + g < n ? first + g : n - 1;
  const auto pair = [](const uint16_t* p) { return static_cast<uint32_t>(p[0]) | static_cast<uint32_t>(p[1]) << 16; };
  const uint32_t a_registers[4] = {pair(a + 16 * mine + 2 * t), 0, pair(a + 16 * mine + 2 * t + 8), 0};
  const uint32_t b_registers[2] = {pair(b + 16 * mine + 2 * t), pair(b + 16 * mine + 2 * t + 8)};
  float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  const bool holds = t == g / 2;
  if (holds) d[g % 2] = acc[mine];
  if constexpr (kKind == Operand::kBf16)
    ptx::mma_bf16(d, a_registers, b_registers);
  else
    ptx::mma_fp16(d, a_registers, b_registers);
  if (holds && first + g < n) result[first + g] = d[g % 2];  // raw: what the tensor core says
}

}  // namespace

Status numerics(Stream stream, Function function, int64_t n, const void* const* inputs, void* result) {
  if (n == 0) return {};
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const auto blocks = [](int64_t items, int64_t per_block) {
    return static_cast<unsigned>((items + per_block - 1) / per_block);
  };
  if (function == Function::kFsum16Bf16 || function == Function::kFsum16Fp16) {
    const auto* acc = static_cast<const float*>(inputs[0]);
    const auto *a = static_cast<const uint16_t*>(inputs[1]), *b = static_cast<const uint16_t*>(inputs[2]);
    const unsigned grid = blocks(n, kThreads / 32 * 8);
    if (function == Function::kFsum16Bf16)
      fsum16_diagonal<Operand::kBf16><<<grid, kThreads, 0, cuda_stream>>>(n, acc, a, b, static_cast<float*>(result));
    else
      fsum16_diagonal<Operand::kFp16><<<grid, kThreads, 0, cuda_stream>>>(n, acc, a, b, static_cast<float*>(result));
  } else {
    elementwise<<<blocks(n, kThreads), kThreads, 0, cuda_stream>>>(function, n, {{inputs[0], inputs[1], inputs[2]}},
                                                                   result);
  }
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? Status{} : Status{std::string("numerics: ") + cudaGetErrorString(error)};
}

}  // namespace muse
