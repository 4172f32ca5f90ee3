// The weight ring: shared-memory slots that the producer warp fills with bulk copies, far ahead of the warps that
// compute. Each chunk of weights is read by one warp, which then gives its slot back.
//
// Chunk c of a block's sequence lies in slot c mod slots. Producer and readers count chunks in the same order
// (schedule.h), so all that passes between them is, per slot, two mbarriers and the number of the chunk asked for. The
// number is needed because a parity tells a phase from the one before it only, and warps do not keep step: a reader may
// be at a slot's next chunk while another still waits for this one.
#pragma once

#include "ffi/decode/cuda/block.cuh"
#include "ffi/decode/cuda/budget.h"

namespace muse {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// True once the phase with this parity is over; waits a short while by itself.
__device__ __forceinline__ bool barrier_passed(uint64_t* barrier, uint32_t parity) {
  uint32_t passed;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(passed)
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
  return passed != 0;
}

// The same without the wait, for lanes that look at barriers of their own.
__device__ __forceinline__ bool barrier_is_past(uint64_t* barrier, uint32_t parity) {
  uint32_t passed;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(passed)
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
  return passed != 0;
}

// The producer's sleep between two looks at its slots, ns: a small part of the time that a copy takes.
constexpr uint32_t kPollInterval = 100;

struct RingShared {
  alignas(128) unsigned char slots[kSlots][kSlotBytes];
  uint64_t full[kSlots], empty[kSlots];
  volatile uint32_t issued[kSlots];  // 1 + the last chunk that was asked for
  uint64_t experts_known;            // once per layer: the producer may read which experts are in use
  volatile uint32_t leaving;         // somebody gave up: nobody waits any more
};

class Ring {
 public:
  __device__ explicit Ring(RingShared& shared) : s_(shared) {}

  // By one thread, before the block's first __syncthreads.
  __device__ void init() const {
    for (int i = 0; i < kSlots; ++i) barrier_init(&s_.full[i], 1), barrier_init(&s_.empty[i], 1), s_.issued[i] = 0;
    barrier_init(&s_.experts_known, kThreads);
    s_.leaving = 0;
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }

  // A reader: chunk c. The producer leaves only after the readers did, and a copy takes microseconds.
  __device__ __forceinline__ const unsigned char* wait(uint32_t c) const {
    const uint32_t slot = c % kSlots, parity = (c >> kSlotsLog2) & 1u;
    while (s_.issued[slot] != c + 1 || !barrier_passed(&s_.full[slot], parity)) {
    }
    return s_.slots[slot];
  }

  // By all lanes of the reading warp.
  __device__ __forceinline__ void release(uint32_t c, int lane) const {
    __syncwarp();
    if (lane == 0) barrier_arrive(&s_.empty[c % kSlots]);
  }

  // The producer: whether chunk c may be fetched.
  __device__ __forceinline__ bool is_free(uint32_t c) const {
    const uint32_t use = c >> kSlotsLog2;
    return use == 0 || barrier_is_past(&s_.empty[c % kSlots], (use - 1) & 1u);
  }

  // Chunk c = `bytes` (a multiple of 16) at `source`; its slot is free.
  __device__ __forceinline__ void fetch(uint32_t c, const unsigned char* source, uint32_t bytes,
                                        uint64_t policy) const {
    const uint32_t slot = c % kSlots, full = shared_address(&s_.full[slot]);
    s_.issued[slot] = c + 1;
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(full), "r"(bytes) : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(shared_address(s_.slots[slot])),
        "l"(source), "r"(bytes), "r"(full), "l"(policy)
        : "memory");
  }

  // By the producer warp at its end: copies in flight must not land in the shared memory of the next block.
  __device__ void drain(int lane) const {
    static_assert(kSlots == 32, "a lane per slot");
    if (const uint32_t issued = s_.issued[lane])
      while (!barrier_passed(&s_.full[lane], ((issued - 1) >> kSlotsLog2) & 1u)) {
      }
  }

  // By all computing threads.
  __device__ void experts_known() const { barrier_arrive(&s_.experts_known); }
  __device__ bool wait_experts_known(uint32_t layer) const {
    while (!barrier_passed(&s_.experts_known, layer & 1u)) {
      if (leaving()) return false;
      __nanosleep(kPollInterval);
    }
    return true;
  }
  __device__ void leave() const { s_.leaving = 1; }
  __device__ bool leaving() const { return __any_sync(~0u, s_.leaving); }

 private:
  RingShared& s_;
};

}  // namespace muse
