// Where a block stands: the blocks of a launch are shared out among the device's ranks, in equal runs.
#pragma once

#include "ffi/decode/cuda/step.cuh"

namespace muse {

// The start of a kernel: parameters to shared memory (the compiler keeps what it derives from parameters in registers
// for the whole launch), the block's place, the ring. Followed by __syncthreads.
__device__ __forceinline__ void start_block(const StepArgs& args, BlockShared& shared) {
  for (uint32_t i = threadIdx.x; i < sizeof(StepArgs) / 4; i += kLaunchThreads)
    reinterpret_cast<uint32_t*>(&shared.args)[i] = reinterpret_cast<const uint32_t*>(&args)[i];
  if (threadIdx.x == 0) {
    shared.gemm = Gemm::kQkv;
    shared.second = false;
    const uint32_t size = gridDim.x / args.local_count;
    const int rank = args.local[blockIdx.x / size];
    Place& place = shared.place;
    place.workspace = shared.args.workspace;
    place.control = reinterpret_cast<Control*>(args.workspace[rank]);
    place.report = args.report[rank];
    place.deadline = ptx::globaltimer() + args.wait_limit_ns;
    place.rank = rank;
    place.index = blockIdx.x % size;
    place.size = size;
    place.layer = static_cast<uint32_t>(args.plan.layer_begin);
    place.epoch = ptx::load_relaxed_sys(&place.control->epoch);
    place.arrivals = ptx::load_relaxed_sys(&place.control->base);
    place.chunk = place.unit = place.dense = place.events = 0;
    place.gave_up =
        ptx::load_relaxed_sys(&place.control->abort);  // an earlier step's failure; nothing works until the rebuild
  }
  if (const int i = threadIdx.x; i < kDenseGemms + 4) {
    const int size = gridDim.x / args.local_count, index = blockIdx.x % size, rank = args.local[blockIdx.x / size];
    const RankPointers& weights = args.rank[rank];
    if (i < kRanks) {
      shared.place.first[i] = (index + size - size * i / 8) % size;
      shared.peer[i] = {args.workspace[i] - args.workspace[rank], args.loopback ? i : rank};
    }
    Jobs& jobs = shared.jobs;
    if (i < kDenseGemms) {
      jobs.dense[i] = dense_job(args.plan, weights, Gemm{static_cast<uint32_t>(i)});
      jobs.tasks[i] = jobs.dense[i].tasks(index, size);
    } else {
      const int nvfp4 = (i - kDenseGemms) / 2, second = (i - kDenseGemms) % 2;
      jobs.experts[nvfp4][second] = expert_job(args.plan, weights, nvfp4, second);
    }
  }
  static_assert(sizeof(Workspace) % sizeof(int64_t) == 0, "offsets only");
  for (uint32_t i = threadIdx.x; i < sizeof(Workspace) / sizeof(int64_t); i += kLaunchThreads)
    reinterpret_cast<int64_t*>(&shared.own)[i] =
        reinterpret_cast<const int64_t*>(&args.offsets)[i] +
        reinterpret_cast<int64_t>(args.workspace[args.local[blockIdx.x / (gridDim.x / args.local_count)]]);
  if (threadIdx.x == 32 * kProducer) Ring(shared.ring).init();
  if (threadIdx.x == 32 * kFirstFinisher) UnitQueue(shared.units).init();
}

// The end, by one thread of a rank's first block behind the launch's last barrier: what the next launch starts from.
__device__ __forceinline__ void finish_launch(const Place& place) {
  place.control->epoch = place.epoch;
  place.control->base = place.arrivals;
}

}  // namespace muse
