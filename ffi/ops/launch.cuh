// What the CUDA launch functions share.
#pragma once

#include <cuda_runtime.h>

#include "ffi/ops/launch.h"

namespace muse {

inline cudaStream_t cuda_stream(Stream stream) { return static_cast<cudaStream_t>(stream); }

inline Status cuda_status(const char* op, cudaError_t error) {
  return error == cudaSuccess ? Status{} : Status{std::string(op) + ": " + cudaGetErrorString(error)};
}

// Whether the launches since the last call were accepted.
inline Status launched(const char* op) { return cuda_status(op, cudaGetLastError()); }

inline Status no_memory(const char* op, int64_t bytes) {
  return {std::string(op) + ": the device has no " + std::to_string(bytes) + " bytes left for intermediate results"};
}

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline unsigned blocks_for(int64_t items, int64_t per_block) {
  return static_cast<unsigned>(divide_up(items, per_block));
}

// Lets a kernel have `bytes` of dynamic shared memory on the current device.
template <typename... Arguments>
Status allow_shared(const char* op, void (*kernel)(Arguments...), int64_t bytes) {
  return cuda_status(op, cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                              cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
}

// A launch of `blocks` x `threads` with `shared` bytes of dynamic shared memory.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), int64_t blocks, int threads, int64_t shared, Stream stream,
                          const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(blocks), config.blockDim = static_cast<unsigned>(threads);
  config.dynamicSmemBytes = static_cast<size_t>(shared), config.stream = cuda_stream(stream);
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace muse
