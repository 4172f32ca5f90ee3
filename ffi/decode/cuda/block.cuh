// The roles of a block's warps: sixteen compute, one streams weights (ring.cuh). Barriers among the computing warps.
#pragma once

#include <cstdint>

namespace muse {

constexpr int kWarps = 16, kThreads = 32 * kWarps;  // that compute
constexpr int kLaunchThreads = kThreads + 128;      // and a warp group of which one thread streams
// Five warps share a quarter of the register file: 96 registers each as launched, of which the last group gives most to
// the others (4 x 112 + 32 = 5 x 96).
constexpr int kComputeRegisters = 112, kProducerRegisters = 32;

template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// threadIdx.x, read anew in every phase. The compiler would otherwise derive dozens of numbers from it once and keep them
// in registers, or spill them, for the whole launch.
__device__ __forceinline__ int thread_index() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return static_cast<int>(index);
}

// All computing threads; the producer never takes part, so __syncthreads would wait for ever. Named barrier 1, because
// 0 is __syncthreads'.
__device__ __forceinline__ void sync_block() {
  asm volatile("barrier.cta.sync 1, %0;" ::"n"(kThreads) : "memory");
}

}  // namespace muse
