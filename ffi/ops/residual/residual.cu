#include "ffi/ops/launch.cuh"
#include "ffi/ops/residual/residual.h"
#include "ffi/ops/residual/row.h"

namespace muse {
namespace {

constexpr int kThreads = 256;

__global__ void coefficients_kernel(int64_t n, float temperature, const uint16_t* gate, float* alpha, float* beta) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < n) gate_coefficient_row(gate + i, 1, temperature, alpha + i, beta + i);
}

__global__ void residual_kernel(int64_t n, int64_t columns, const float* s, const uint16_t* branch, const float* alpha,
                                const float* beta, float* out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < n) residual_row(s + i, branch + i, alpha + i % columns, beta + i % columns, 1, out + i);
}

}  // namespace

Status gate_coefficients(Stream stream, int64_t columns, float temperature, const uint16_t* gate, float* alpha,
                         float* beta) {
  if (columns == 0) return {};
  coefficients_kernel<<<blocks_for(columns, kThreads), kThreads, 0, cuda_stream(stream)>>>(columns, temperature, gate,
                                                                                           alpha, beta);
  return launched("gate_coefficients");
}

Status residual(Stream stream, int64_t rows, int64_t columns, const float* s, const uint16_t* n, const float* alpha,
                const float* beta, float* out) {
  if (rows * columns == 0) return {};
  residual_kernel<<<blocks_for(rows * columns, kThreads), kThreads, 0, cuda_stream(stream)>>>(rows * columns, columns,
                                                                                              s, n, alpha, beta, out);
  return launched("residual");
}

}  // namespace muse
