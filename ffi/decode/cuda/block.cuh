// The roles of a block's warps: eight compute, one for each K segment of the contract; four stream weights
// (producer.cuh). With twelve warps a thread may have 168 registers. Sixteen computing warps would leave 96, and what
// does not fit them spills to L2, because the weight ring takes L1's place.
#pragma once

#include <cstdint>

namespace muse {

constexpr int kWarps = 8, kThreads = 32 * kWarps;  // that compute
constexpr int kProducerWarps = 4;                  // that stream weights
constexpr int kLaunchThreads = kThreads + 32 * kProducerWarps;

// threadIdx.x, read anew in every phase. The compiler would otherwise derive dozens of numbers from it once and keep
// them in registers, or spill them, for the whole launch.
__device__ __forceinline__ int thread_index() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return static_cast<int>(index);
}

// All computing threads; the producers never take part, so __syncthreads would wait for ever. Named barrier 1, because
// 0 is __syncthreads'.
__device__ __forceinline__ void sync_block() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }

// The producers.
__device__ __forceinline__ void sync_producers() {
  asm volatile("bar.sync 2, %0;" ::"n"(32 * kProducerWarps) : "memory");
}

}  // namespace muse
