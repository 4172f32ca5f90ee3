// The way of an expert GEMM's unit from the warps that make its segments' sums to the warps that add them up: as in the
// weight ring, unit u of a block's sequence has place u mod kUnits, with two mbarriers. All lanes arrive, for what each
// of them stored or read.
#pragma once

#include "ffi/decode/cuda/ring.cuh"

namespace muse {

struct UnitQueueShared {
  uint64_t full[kUnits], empty[kUnits];
  uint64_t begun, ended;              // once per GEMM: there are units to wait for; the finishing warps have no more
  uint64_t dense_begun, dense_ended;  // once per dense pass with tasks for the finishing warps
};

class UnitQueue {
 public:
  __device__ explicit UnitQueue(UnitQueueShared& shared) : s_(shared) {}

  // By one thread, before the block's first __syncthreads.
  __device__ void init() const {
    for (int i = 0; i < kUnits; ++i)
      ptx::mbarrier_init(&s_.full[i], kThreads), ptx::mbarrier_init(&s_.empty[i], 32 * kFinishers);
    ptx::mbarrier_init(&s_.begun, kThreads);
    ptx::mbarrier_init(&s_.ended, 32 * kFinishers);
    ptx::mbarrier_init(&s_.dense_begun, kThreads);
    ptx::mbarrier_init(&s_.dense_ended, 32 * kFinishers);
    ptx::fence_mbarrier_init();
  }

  // Computing warps. `second`: of a layer's two GEMMs, which is also the parity.
  __device__ void begin() const { ptx::mbarrier_arrive(&s_.begun); }
  __device__ __forceinline__ void wait_place(uint32_t unit) const {
    const uint32_t use = unit >> kUnitsLog2;
    if (use > 0) pass(&s_.empty[unit % kUnits], (use - 1) & 1u);
  }
  __device__ __forceinline__ void bring(uint32_t unit) const { ptx::mbarrier_arrive(&s_.full[unit % kUnits]); }
  __device__ __forceinline__ void wait_end(bool second) const { pass(&s_.ended, second); }
  // `pass`: how many there were before.
  __device__ void begin_dense() const { ptx::mbarrier_arrive(&s_.dense_begun); }
  __device__ __forceinline__ void wait_dense_end(uint32_t pass) const { this->pass(&s_.dense_ended, pass & 1u); }

  // Finishing warps; false: the block is leaving.
  __device__ bool wait_begin(bool second, const Ring& ring) const { return pass_or_leave(&s_.begun, second, ring); }
  __device__ bool wait_dense(uint32_t pass, const Ring& ring) const {
    return pass_or_leave(&s_.dense_begun, pass & 1u, ring);
  }
  __device__ void end_dense() const { ptx::mbarrier_arrive(&s_.dense_ended); }
  __device__ bool wait_unit(uint32_t unit, const Ring& ring) const {
    return pass_or_leave(&s_.full[unit % kUnits], (unit >> kUnitsLog2) & 1u, ring);
  }
  __device__ void done(uint32_t unit) const { ptx::mbarrier_arrive(&s_.empty[unit % kUnits]); }
  __device__ void end() const { ptx::mbarrier_arrive(&s_.ended); }

 private:
  __device__ static __forceinline__ void pass(uint64_t* barrier, uint32_t parity) {
    while (!ptx::mbarrier_try_wait(barrier, parity)) {
    }
  }
  __device__ static bool pass_or_leave(uint64_t* barrier, uint32_t parity, const Ring& ring) {
    // Lanes may see the phase end at different looks; none goes on before all have.
    while (!__all_sync(~0u, ptx::mbarrier_try_wait(barrier, parity))) {
      if (ring.leaving()) return false;
      __nanosleep(kPollInterval);
    }
    return true;
  }

  UnitQueueShared& s_;
};

}  // namespace muse
