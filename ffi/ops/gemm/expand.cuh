// Rows of NVFP4 activations as the exact bf16 numbers that the W4A4 tile takes.
#pragma once

#include "ffi/numerics/nvfp4.cuh"
#include "ffi/ops/gemm/gemm.h"
#include "ffi/ops/launch.cuh"

namespace muse {

constexpr int kExpandThreads = 256;

static __global__ void expand_codes_kernel(int64_t blocks, Nvfp4 x, uint16_t* out) {
  const int64_t b = static_cast<int64_t>(blockIdx.x) * kExpandThreads + threadIdx.x;
  if (b >= blocks) return;
  uint4 operands[2];
  expand_block(*reinterpret_cast<const uint2*>(x.codes + 8 * b), x.scales[b], operands);
  reinterpret_cast<uint4*>(out)[2 * b] = operands[0];
  reinterpret_cast<uint4*>(out)[2 * b + 1] = operands[1];
}

// out[i] = code * scale for `blocks` blocks of sixteen.
inline Status expand_codes(Stream stream, const char* op, int64_t blocks, Nvfp4 x, uint16_t* out) {
  expand_codes_kernel<<<blocks_for(blocks, kExpandThreads), kExpandThreads, 0, cuda_stream(stream)>>>(blocks, x, out);
  return launched(op);
}

}  // namespace muse
