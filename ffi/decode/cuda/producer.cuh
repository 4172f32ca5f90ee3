// The producers: one thread of each producer warp walks the block's schedule and keeps the weight ring full. They never
// wait for a phase, only for free slots, and once per layer to be told which experts are in use.
//
// Chunks go to the producers in turn: one alone would spend longer on a chunk than the memory does. They sleep on
// mbarriers; polling would take the shared-memory pipe from the warps that compute.
#pragma once

#include "ffi/decode/cuda/ring.cuh"
#include "ffi/decode/cuda/schedule.h"
#include "ffi/decode/cuda/step.cuh"

namespace muse {

class Producer {
 public:
  __device__ explicit Producer(BlockShared& shared)
      : s_(shared),
        ring_(shared.ring),
        index_(shared.place.index),
        size_(shared.place.size),
        which_((threadIdx.x - kThreads) / 32) {
    // Weights are read once: let them not push activations out of L2.
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy_));
  }

  // Each returns false when the block is leaving.
  __device__ bool dense(const DenseJob& job, int passes) {
    const Range range = part(job.tasks(), index_, size_);
    const int32_t chunks = job.chunks();
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass)
#pragma unroll 1
      for (int32_t first = range.begin; first < range.end; first += kWarps) {
        const int32_t at_once = min(kWarps, range.end - first);
#pragma unroll 1
        for (int32_t c = 0; c < chunks; ++c) {
          const auto from = [&](int32_t i) {
            const int32_t segment = (first + i) / job.groups;
            return reinterpret_cast<const unsigned char*>(job.chunk(first + i - segment * job.groups, segment, c));
          };
          if (!round(at_once, from, job.chunk_tiles(c) * kTile * 2)) return false;
        }
      }
    return true;
  }

  // The experts in use, as group_pairs left them.
  __device__ bool experts(const ExpertJob& job) {
    const Range range = part(s_.slices * job.groups, index_, size_);
    const int32_t chunks = job.chunks(), in_round = kSegments * job.unit_groups;
#pragma unroll 1
    for (int32_t unit = range.begin; unit < range.end; ++unit) {
      const int32_t slice = unit / job.groups;
      const unsigned char* first = job.group(s_.expert[slice], (unit - slice * job.groups) * job.unit_groups);
#pragma unroll 1
      for (int32_t c = 0; c < chunks; ++c, first += job.chunk_bytes)
        if (!round(in_round, [&](int32_t i) { return first + i * job.segment_bytes; }, job.bytes(c))) return false;
    }
    return true;
  }

  // Of n pieces of `bytes` at from(i), this producer's share into L2.
  template <typename From>
  __device__ __forceinline__ void prefetch(int32_t n, From from, uint32_t bytes) const {
#pragma unroll 1
    for (int32_t i = which_; i < n; i += kProducerWarps)
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from(i)), "r"(bytes) : "memory");
  }

  __device__ bool wait_experts_known(uint32_t layer) const { return ring_.wait_experts_known(layer); }

 private:
  // The chunks that the computing warps use side by side; chunk i lies at from(i). A slot's chunks all fall to the same
  // producer.
  template <typename From>
  __device__ __forceinline__ bool round(int32_t count, From from, uint32_t bytes) {
    static_assert(kSlots % kProducerWarps == 0, "a slot belongs to one producer");
#pragma unroll 1
    for (int32_t i = (which_ - chunk_) % kProducerWarps; i < count; i += kProducerWarps) {
      if (!ring_.wait_free(chunk_ + i)) return false;
      ring_.fetch(chunk_ + i, from(i), bytes, policy_);
    }
    chunk_ += count;
    return true;
  }

  BlockShared& s_;
  const Ring ring_;
  const uint32_t index_, size_, which_;
  uint64_t policy_;
  uint32_t chunk_ = 0;
};

// By all threads of the producer warps, when the walk is over.
__device__ __forceinline__ void finish_producers(BlockShared& shared) {
  sync_producers();
  if (threadIdx.x - kThreads < kSlots) Ring(shared.ring).drain(threadIdx.x % 32);
}

}  // namespace muse
