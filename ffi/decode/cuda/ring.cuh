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
#include "ffi/device/ptx.cuh"

namespace muse {

// The producer's sleep between two looks at its slots, ns: a small part of the time that a copy takes.
constexpr uint32_t kPollInterval = 100;

struct RingShared {
  alignas(128) unsigned char slots[kSlots][kSlotBytes];
  uint64_t full[kSlots], empty[kSlots];
  volatile uint32_t issued[kSlots];  // 1 + the last chunk that was asked for
  uint64_t experts_known;            // once per layer: the producer may read which experts are in use
  volatile uint32_t streaming;       // the block is within a GEMM
  volatile uint32_t leaving;         // somebody gave up: nobody waits any more
};

class Ring {
 public:
  __device__ explicit Ring(RingShared& shared) : s_(shared) {}

  // By one thread, before the block's first __syncthreads.
  __device__ void init() const {
    for (int i = 0; i < kSlots; ++i)
      ptx::mbarrier_init(&s_.full[i], 1), ptx::mbarrier_init(&s_.empty[i], 1), s_.issued[i] = 0;
    ptx::mbarrier_init(&s_.experts_known, kThreads);
    s_.streaming = s_.leaving = 0;
    ptx::fence_mbarrier_init();
  }

  // A reader: chunk c. The producer leaves only after the readers did, and a copy takes microseconds.
  __device__ __forceinline__ const unsigned char* wait(uint32_t c) const {
    const uint32_t slot = c % kSlots, parity = (c >> kSlotsLog2) & 1u;
    while (s_.issued[slot] != c + 1 || !ptx::mbarrier_try_wait(&s_.full[slot], parity)) ptx::look_again();
    return s_.slots[slot];
  }
  // Likewise by a warp whose next chunks are c, c + stride and so on, `count` of them: as soon as c is there, how many
  // in a row are, so that it need not look at every one. slot(c) is where one of them lies. A lane looks at each,
  // sixteen at most: some lane has to see none, or the count would have no end.
  __device__ __forceinline__ int wait_run(uint32_t c, uint32_t stride, int count, int lane) const {
    const uint32_t own = c + lane * stride;
    while (true) {
      const bool there = lane < min(count, 16) && s_.issued[own % kSlots] == own + 1 && has_landed(own);
      const int run = __ffs(~__ballot_sync(~0u, there)) - 1;
      __syncwarp();
      if (run > 0) return run;
      ptx::mbarrier_try_wait(&s_.full[c % kSlots], (c >> kSlotsLog2) & 1u);
      ptx::look_again();
    }
  }
  __device__ __forceinline__ const unsigned char* slot(uint32_t c) const { return s_.slots[c % kSlots]; }

  // By all lanes of the reading warp.
  __device__ __forceinline__ void release(uint32_t c, int lane) const {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&s_.empty[c % kSlots]);
  }

  // The producer: whether chunk c may be fetched.
  __device__ __forceinline__ bool is_free(uint32_t c) const {
    const uint32_t use = c >> kSlotsLog2;
    return use == 0 || ptx::mbarrier_test_wait(&s_.empty[c % kSlots], (use - 1) & 1u);
  }

  __device__ __forceinline__ bool has_landed(uint32_t c) const {
    return ptx::mbarrier_test_wait(&s_.full[c % kSlots], (c >> kSlotsLog2) & 1u);
  }

  // By one computing thread, at the beginning and at the end of a GEMM.
  __device__ void set_streaming(bool streaming) const { s_.streaming = streaming; }
  __device__ bool streaming() const { return s_.streaming; }

  // Chunk c = `bytes` (a multiple of 16) at `source`; its slot is free.
  __device__ __forceinline__ void fetch(uint32_t c, const unsigned char* source, uint32_t bytes,
                                        uint64_t policy) const {
    const uint32_t slot = c % kSlots;
    s_.issued[slot] = c + 1;
    ptx::mbarrier_arrive_expect(&s_.full[slot], bytes);
    ptx::bulk_copy(s_.slots[slot], source, bytes, &s_.full[slot], policy);
  }

  // By the producer warp at its end: copies in flight must not land in the shared memory of the next block.
  __device__ void drain(int lane) const {
    static_assert(kSlots == 32, "a lane per slot");
    if (const uint32_t issued = s_.issued[lane])
      while (!ptx::mbarrier_try_wait(&s_.full[lane], ((issued - 1) >> kSlotsLog2) & 1u)) {
      }
  }

  // By all computing threads.
  __device__ void experts_known() const { ptx::mbarrier_arrive(&s_.experts_known); }
  __device__ bool wait_experts_known(uint32_t layer) const {
    while (!__all_sync(~0u, ptx::mbarrier_try_wait(&s_.experts_known, layer & 1u))) {
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
