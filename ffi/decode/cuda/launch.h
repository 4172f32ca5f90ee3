// What the two fused kernels' launches have in common: residency, and the start of every block.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "ffi/decode/cuda/block.cuh"
#include "ffi/decode/cuda/launches.h"
#include "ffi/ops/launch.cuh"

namespace muse {

// Gives `kernel` its shared memory and finds how many of its blocks are resident at once.
template <typename Kernel>
Status prepare_kernel(const char* name, Kernel kernel, int64_t fixed_bytes, int64_t region_bytes, Prepared* prepared) {
  int device = 0, limit = 0, multiprocessors = 0, per_multiprocessor = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (e != cudaSuccess) return cuda_status(name, e);
  const int bytes = static_cast<int>(fixed_bytes + region_bytes);
  if (bytes > limit)
    return {std::string(name) + ": a block needs " + std::to_string(bytes) + " bytes of shared memory, device " +
            std::to_string(device) + " has " + std::to_string(limit) + "; the model's hidden size is too large"};
  e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (e == cudaSuccess)
    e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, kLaunchThreads, bytes);
  if (e != cudaSuccess) return cuda_status(name, e);
  if (per_multiprocessor == 0) return {std::string(name) + ": a block does not fit on a multiprocessor"};
  prepared->region_bytes = static_cast<uint32_t>(region_bytes);
  prepared->blocks = multiprocessors;  // one per multiprocessor: its ring fills the shared memory
  return {};
}

// Every local rank gets an equal share of the blocks.
template <typename Kernel>
cudaError_t launch_fused(Kernel kernel, const StepArgs& args, int blocks, int64_t fixed_bytes, Stream stream) {
  return launch_kernel(kernel, blocks / args.local_count * args.local_count, kLaunchThreads,
                       fixed_bytes + args.region_bytes, stream, args);
}

// Results start as ones: what a launch that gave up leaves is NaN everywhere and token -1.
inline cudaError_t fill_with_ones(void* data, int64_t bytes, cudaStream_t stream) {
  return data && bytes ? cudaMemsetAsync(data, 0xFF, bytes, stream) : cudaSuccess;
}

// Likewise for the head's.
inline cudaError_t clear_head(const StepArgs& args, cudaStream_t stream) {
  const Plan& p = args.plan;
  cudaError_t e = fill_with_ones(args.head.token, p.rows * static_cast<int64_t>(sizeof(int32_t)), stream);
  if (e == cudaSuccess) e = cudaMemsetAsync(args.head.nan, 1, p.rows, stream);
  // The local ranks' logits lie side by side.
  if (e == cudaSuccess)
    e = fill_with_ones(args.head.logits[args.local[0]],
                       args.local_count * p.rows * p.vocab_rank() * static_cast<int64_t>(sizeof(float)), stream);
  return e;
}

}  // namespace muse
