// CUDA C++ and its runtime as far as the fused kernels use them, on the simulator.
#pragma once

// Before the words below: the standard library uses some of them.
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "simulator.h"

#define __host__
#define __device__
#define __global__
#define __shared__ thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __grid_constant__
#define __builtin_assume(condition)

// threadIdx.x and the like: objects, not macros, because launch configurations have members of these names.
namespace simulator {
struct Coordinate {
  const Dim3& (*of)();
  operator unsigned() const { return of().x; }
};
}  // namespace simulator
struct {
  simulator::Coordinate x;
} const threadIdx{{simulator::thread_index}}, blockIdx{{simulator::block_index}}, blockDim{{simulator::block_size}},
    gridDim{{simulator::grid_size}};

using dim3 = simulator::Dim3;
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) int4 {
  int32_t x, y, z, w;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline long min(long a, long b) { return a < b ? a : b; }
inline long max(long a, long b) { return a > b ? a : b; }

// --- memory

template <typename T>
T __ldcg(const T* p) {
  return *const_cast<const volatile std::remove_cv_t<T>*>(p);
}
#define SIMULATOR_WIDE_LOAD(T)  \
  inline T __ldcg(const T* p) { \
    T v;                        \
    memcpy(&v, p, sizeof(v));   \
    return v;                   \
  }
SIMULATOR_WIDE_LOAD(float2)
SIMULATOR_WIDE_LOAD(float4)
SIMULATOR_WIDE_LOAD(uint2)
SIMULATOR_WIDE_LOAD(int4)
SIMULATOR_WIDE_LOAD(uint4)
#undef SIMULATOR_WIDE_LOAD
template <typename T>
T __ldg(const T* p) {
  return __ldcg(p);
}

inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }

template <typename T>
T atomicAdd(T* p, T v) {
  return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);
}
template <typename T>
T atomicOr(T* p, T v) {
  return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST);
}
template <typename T>
T atomicCAS(T* p, T expected, T v) {
  __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}
template <typename T>
T atomicMax(T* p, T v) {
  T old = *p;
  while (old < v && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return old;
}
template <typename T>
T atomicMin(T* p, T v) {
  T old = *p;
  while (v < old && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return old;
}

// --- threads: masks are always those of whole warps

inline void __nanosleep(unsigned) { simulator::sleep(); }
inline void __syncthreads() { simulator::barrier(0, blockDim.x); }
inline void __syncwarp(unsigned = ~0u) { simulator::sync_warp(); }

namespace simulator {
template <typename T>
struct Shuffled {
  T value;
  int source;
};
template <typename T>
T shuffle(T value, int source) {
  return meet<T>("__shfl_sync", Shuffled<T>{value, source}, [](const Exchange& in, Exchange& out) {
    for (int i = 0; i < 32; ++i) put(out, i, at<Shuffled<T>>(in, at<Shuffled<T>>(in, i).source & 31).value);
  });
}
}  // namespace simulator

template <typename T>
T __shfl_sync(unsigned, T v, int source) {
  return simulator::shuffle(v, source);
}
template <typename T>
T __shfl_xor_sync(unsigned, T v, int mask) {
  return simulator::shuffle(v, static_cast<int>(simulator::lane()) ^ mask);
}
template <typename T>
T __shfl_up_sync(unsigned, T v, int by) {
  const int lane = static_cast<int>(simulator::lane());
  return simulator::shuffle(v, lane >= by ? lane - by : lane);
}
template <typename T>
T __shfl_down_sync(unsigned, T v, int by) {
  const int lane = static_cast<int>(simulator::lane());
  return simulator::shuffle(v, lane + by < 32 ? lane + by : lane);
}
inline unsigned __ballot_sync(unsigned, bool yes) {
  return simulator::meet<unsigned>("__ballot_sync", yes, [](const simulator::Exchange& in, simulator::Exchange& out) {
    unsigned all = 0;
    for (int i = 0; i < 32; ++i) all |= static_cast<unsigned>(simulator::at<bool>(in, i)) << i;
    for (int i = 0; i < 32; ++i) simulator::put(out, i, all);
  });
}
inline bool __any_sync(unsigned, bool yes) { return __ballot_sync(~0u, yes) != 0; }
inline bool __all_sync(unsigned, bool yes) { return __ballot_sync(~0u, yes) == ~0u; }
inline unsigned __reduce_min_sync(unsigned, unsigned v) {
  return simulator::meet<unsigned>("__reduce_min_sync", v, [](const simulator::Exchange& in, simulator::Exchange& out) {
    unsigned least = ~0u;
    for (int i = 0; i < 32; ++i) least = min(least, simulator::at<unsigned>(in, i));
    for (int i = 0; i < 32; ++i) simulator::put(out, i, least);
  });
}

// --- arithmetic

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= static_cast<uint32_t>(bytes >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  return out;
}

// --- the runtime: every address is everybody's, and a launch has ended when the call returns

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorPeerAccessAlreadyEnabled };
enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlockOptin, cudaDevAttrMultiProcessorCount };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaMemcpyKind { cudaMemcpyDeviceToHost };
constexpr unsigned cudaHostAllocMapped = 0, cudaHostAllocPortable = 0, cudaIpcMemLazyEnablePeerAccess = 0;
using cudaStream_t = void*;
struct cudaIpcMemHandle_t {
  char reserved[64];
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

constexpr int kSimulatedShared = 232448;  // bytes of a block, as an H200 has
int simulated_multiprocessors();

inline int& simulated_device() {
  static thread_local int device = 0;
  return device;
}
inline const char* cudaGetErrorString(cudaError_t e) { return e == cudaSuccess ? "no error" : "invalid value"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = simulated_device(), cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) { return simulated_device() = device, cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 1, cudaSuccess; }
inline cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = which == cudaDevAttrMultiProcessorCount ? simulated_multiprocessors() : kSimulatedShared;
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int bytes) {
  return bytes <= kSimulatedShared ? cudaSuccess : cudaErrorInvalidValue;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  return *blocks = 1, cudaSuccess;
}
template <typename T>
cudaError_t cudaMalloc(T** p, size_t bytes) {
  *p = static_cast<T*>(aligned_alloc(256, (bytes + 255) / 256 * 256));
  return *p ? cudaSuccess : cudaErrorInvalidValue;
}
inline cudaError_t cudaFree(void* p) { return free(p), cudaSuccess; }
inline cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) { return cudaMalloc(p, bytes); }
inline cudaError_t cudaFreeHost(void* p) { return cudaFree(p); }
inline cudaError_t cudaHostGetDevicePointer(void** p, void* host, unsigned) { return *p = host, cudaSuccess; }
inline cudaError_t cudaMemset(void* p, int value, size_t bytes) { return memset(p, value, bytes), cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
  return cudaMemset(p, value, bytes);
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return memcpy(to, from, bytes), cudaSuccess;
}
// Handles are for other processes; there are none.
inline cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return cudaErrorInvalidValue; }
inline cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) { return cudaErrorInvalidValue; }
inline cudaError_t cudaIpcCloseMemHandle(void*) { return cudaErrorInvalidValue; }

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  const std::tuple<Parameters...> copies(arguments...);
  simulator::launch(config->gridDim, config->blockDim, config->dynamicSmemBytes, [&] { std::apply(kernel, copies); });
  return cudaSuccess;
}
