// The producer: one thread that walks the block's schedule and keeps the weight ring full. It never waits for a phase,
// only for a free slot, and once per layer to be told which experts are in use.
#pragma once

#include "ffi/decode/cuda/ring.cuh"
#include "ffi/decode/cuda/schedule.h"
#include "ffi/decode/cuda/sync.cuh"

namespace muse {

class Producer {
 public:
  __device__ Producer(RingShared& ring, uint32_t index, uint32_t size) : ring_(ring), index_(index), size_(size) {
    // Weights are read once: let them not push activations out of L2.
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy_));
  }

  // Each returns false when the block is leaving.
  __device__ bool dense(const DenseJob& job, int passes) {
    const Range range = part(job.tasks(), index_, size_);
    const int32_t chunks = job.chunks();
    for (int pass = 0; pass < passes; ++pass)
      for (int32_t first = range.begin; first < range.end; first += kWarps) {
        const int32_t at_once = min(kWarps, range.end - first);
        for (int32_t c = 0; c < chunks; ++c) {
          const uint32_t bytes = job.chunk_tiles(c) * kTile * 2;
          int32_t segment = first / job.groups, group = first % job.groups;
          for (int32_t w = 0; w < at_once; ++w) {
            if (!fill(reinterpret_cast<const unsigned char*>(job.chunk(group, segment, c)), bytes)) return false;
            if (++group == job.groups) group = 0, ++segment;
          }
        }
      }
    return true;
  }

  // `expert` and the number of slices as group_pairs left them.
  __device__ bool experts(const ExpertJob& job, const int16_t* expert, int slices) {
    const Range range = part(int64_t{slices} * job.groups, index_, size_);
    const int32_t at_once = job.units_at_once(), chunks = job.chunks(), per_unit = kSegments * job.unit_groups;
    for (int32_t batch = 0; batch < job.batches(range); ++batch) {
      const Range units = job.batch(range, batch);
      for (int32_t first = units.begin; first < units.end; first += at_once) {
        const int32_t in_round = min(at_once, units.end - first);
        for (int32_t c = 0; c < chunks; ++c)
          for (int32_t u = 0; u < in_round; ++u) {
            const int32_t unit = first + u, slice = unit / job.groups;
            const unsigned char* from =
                job.group(expert[slice], unit % job.groups * job.unit_groups) + c * job.chunk_bytes;
            for (int32_t w = 0; w < per_unit; ++w, from += job.segment_bytes)
              if (!fill(from, job.bytes(c))) return false;
          }
      }
    }
    return true;
  }

  __device__ void prefetch(const void* from, uint32_t bytes) const {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
  }
  __device__ bool wait_experts_known(uint32_t layer) const { return ring_.wait_experts_known(layer); }
  __device__ void finish() const { ring_.drain(chunk_); }

 private:
  __device__ bool fill(const unsigned char* from, uint32_t bytes) {
    const bool filled = ring_.fill(chunk_, from, bytes, policy_);
    chunk_ += filled;
    return filled;
  }

  const Ring ring_;
  const uint32_t index_, size_;
  uint64_t policy_;
  uint32_t chunk_ = 0;
};

}  // namespace muse
