// Where a block stands: the blocks of a launch are shared out among the device's ranks, in equal runs.
#pragma once

#include "ffi/decode/cuda/step.cuh"

namespace muse {

__device__ __forceinline__ Place place_of(const StepArgs& args, int64_t layer) {
  const uint32_t size = gridDim.x / args.local_count;
  const int rank = args.local[blockIdx.x / size];
  Control* control = reinterpret_cast<Control*>(args.workspace[rank]);
  return {control,
          args.report[rank],
          now() + args.wait_limit_ns,
          static_cast<uint32_t>(rank),
          blockIdx.x % size,
          size,
          static_cast<uint32_t>(layer),
          load_relaxed(&control->epoch),
          0,
          0,
          0};
}

// The start of a kernel: parameters to shared memory (the compiler keeps what it derives from parameters in registers
// for the whole launch), the block's place, the ring. Followed by __syncthreads.
__device__ __forceinline__ void start_block(const StepArgs& args, BlockShared& shared) {
  for (uint32_t i = threadIdx.x; i < sizeof(StepArgs) / 4; i += kLaunchThreads)
    reinterpret_cast<uint32_t*>(&shared.args)[i] = reinterpret_cast<const uint32_t*>(&args)[i];
  if (threadIdx.x == 0) shared.place = place_of(args, args.plan.layer_begin);
  if (threadIdx.x == kThreads) Ring(shared.ring).init();
}

}  // namespace muse
