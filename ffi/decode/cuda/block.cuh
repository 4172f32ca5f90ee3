// The roles of a block's warps: eight compute, one for each K segment of the contract; one streams weights
// (producer.cuh); three add up what the experts' chains made, while these go on (expert_finish.cuh). A thread may have
// 168 registers: a quarter of the multiprocessor's for the three warps that share it. Sixteen computing warps would
// leave 96, and what does not fit them spills to L2, because the weight ring takes L1's place.
#pragma once

#include <cstdint>

#include "ffi/device/ptx.cuh"

namespace muse {

constexpr int kWarps = 8, kThreads = 32 * kWarps;  // that compute
constexpr int kProducer = kWarps, kFirstFinisher = kWarps + 1, kFinishers = 3;
constexpr int kLaunchThreads = 32 * (kFirstFinisher + kFinishers);

// Tasks of a dense GEMM that a block has under way, one for each warp that computes or finishes experts' units. Of
// 132 blocks only the head's GEMM has more than eight a block; a rank of fewer blocks has more of every GEMM.
constexpr int kTasksAtOnce = kWarps + kFinishers;

// threadIdx.x, read anew in every phase. The compiler would otherwise derive dozens of numbers from it once and keep
// them in registers, or spill them, for the whole launch.
__device__ __forceinline__ int thread_index() { return ptx::thread_index(); }

// All computing threads; the producer never takes part, so __syncthreads would wait for ever. Named barrier 1, because
// 0 is __syncthreads'.
__device__ __forceinline__ void sync_block() { ptx::bar_sync<1, kThreads>(); }

}  // namespace muse
