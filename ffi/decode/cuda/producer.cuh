// The producer: one warp that walks the block's schedule and keeps the weight ring full, a lane for each slot. It never
// waits for a phase, only for free slots, and once per layer to be told which experts are in use.
#pragma once

#include "ffi/decode/cuda/ring.cuh"
#include "ffi/decode/cuda/schedule.h"
#include "ffi/decode/cuda/step.cuh"

namespace muse {

// Copies of a block that are under way at once. All else that the multiprocessor loads, and code that it has not at
// hand, comes behind them: a ring's worth takes 4 us. Within a GEMM they must fill the memory's latency (on an H200 ten
// are too few, sixteen no better); between two, other blocks' words are on everybody's way, and the ring has time.
constexpr int kCopiesInGemm = 14, kCopiesBetween = 4;

class Producer {
 public:
  __device__ explicit Producer(BlockShared& shared) : s_(shared), ring_(shared.ring), lane_(threadIdx.x % 32) {
    // Weights are read once: let them not push activations out of L2.
    policy_ = ptx::evict_first_policy();
  }

  // What a block reads of a GEMM. Task t of the block lies `stride` bytes behind the one before it; of the experts',
  // whose tasks are the segments of units' row groups, only those of a unit do.
  struct [[nodiscard]] Reading {
    const unsigned char* from;
    uint32_t stride, length, chunk_bytes;  // of a task; of a chunk, at most
    uint32_t chunks, tasks, at_once, passes;
    const ExpertJob* job;  // of the experts, or null
    int unit, expert;      // the block's first unit, the layer's first expert
  };

  // The tasks are of one segment.
  static __device__ __forceinline__ Reading dense(const DenseJob& job, Range range, int layer, int passes) {
    const int segment = job.segment(range);
    const uint32_t length = job.blocks * static_cast<uint32_t>(kTile) * 2;
    return {reinterpret_cast<const unsigned char*>(job.chunk(layer, range.begin - segment * job.groups, segment, 0)),
            length * job.segments,
            length,
            kSlotTiles * kTile * 2,
            static_cast<uint32_t>(job.chunks()),
            static_cast<uint32_t>(range.end - range.begin),
            kTasksAtOnce,
            static_cast<uint32_t>(passes),
            nullptr,
            0,
            0};
  }

  // `first`: the number of the layer's first expert. Those in use are as group_pairs left them.
  static __device__ __forceinline__ Reading experts(const ExpertJob& job, Range range, int first) {
    const uint32_t of_unit = kSegments * job.unit_groups, bytes = job.segment_bytes;
    return {job.weights,
            bytes,
            bytes,
            static_cast<uint32_t>(job.chunk_bytes),
            static_cast<uint32_t>(job.chunks),
            (range.end - range.begin) * of_unit,
            of_unit,
            1,
            &job,
            range.begin,
            first};
  }

  // Called by the whole warp; false: the block is leaving. Long code: one call for all GEMMs.
  __device__ __forceinline__ bool stream(const Reading& what) {
    static_assert(kSlots == 32, "a lane per slot");
    const uint32_t count = what.tasks * what.chunks * what.passes;
    uint32_t k = (lane_ - chunk_) % kSlots;
    // Chunk k is the `rest`-th of its round: `at_once` tasks, or as many as there still are, chunk by chunk. A lane
    // keeps its place, because to find it anew takes divisions.
    uint32_t rest = k, round = 0;
    Divisor by_tasks{};  // of the round; none yet
    const unsigned char* data = nullptr;
    uint32_t bytes = 0;
    bool known = false;
#pragma unroll 1
    while (true) {
      if (k < count && !known) {  // before its slot is free
#pragma unroll 1
        while (rest >= by_tasks.value * what.chunks) {
          rest -= by_tasks.value * what.chunks;
          round += by_tasks.value;
          if (round == what.tasks) round = 0;
          const uint32_t tasks = min(what.at_once, what.tasks - round);
          if (static_cast<int32_t>(tasks) != by_tasks.value) by_tasks = divisor(tasks);
        }
        const uint32_t c = by_tasks.quotient(rest), task = rest - c * by_tasks.value;
        data = what.from + uint64_t{first_task(what, round) + task} * what.stride + c * what.chunk_bytes;
        bytes = min(what.chunk_bytes, what.length - c * what.chunk_bytes);
        known = true;
      }
      const uint32_t next = __reduce_min_sync(~0u, known ? k : ~0u);
      if (next == ~0u) break;
      if (flying_ && ring_.has_landed(last_)) flying_ = false;
      const int room = (ring_.streaming() ? kCopiesInGemm : kCopiesBetween) - __popc(__ballot_sync(~0u, flying_));
      // The free slots' lanes, counted from the one whose chunk is needed first.
      const bool free = known && ring_.is_free(chunk_ + k);
      const uint32_t lanes = __ballot_sync(~0u, free), first = (chunk_ + next) % kSlots;
      const uint32_t before =
          (lanes >> first | lanes << (kSlots - first) % kSlots) & ((1u << ((lane_ - first) % kSlots)) - 1);
      const bool ready = free && __popc(before) < room;
      if (ready) {
        last_ = chunk_ + k;
        ring_.fetch(last_, data, bytes, policy_);
        flying_ = true;
        k += kSlots;
        rest += kSlots;
        known = false;
      }
      if (__any_sync(~0u, ready)) continue;
      if (ring_.leaving()) return false;
      __nanosleep(kPollInterval);
    }
    chunk_ += count;
    return true;
  }

  __device__ bool wait_experts_known(uint32_t layer) const { return ring_.wait_experts_known(layer); }

 private:
  // Where the tasks of a round begin, in tasks from the start of the weights.
  __device__ __forceinline__ uint32_t first_task(const Reading& what, uint32_t round) const {
    if (!what.job) return round;
    const ExpertJob& job = *what.job;
    const int unit = what.unit + static_cast<int>(round / kSegments >> (job.unit_groups - 1)),
              slice = job.by_groups.quotient(unit);
    return ((what.expert + s_.expert[slice] - slice) * job.groups + unit) * what.at_once;
  }

  BlockShared& s_;
  const Ring ring_;
  const uint32_t lane_;
  uint64_t policy_;
  uint32_t chunk_ = 0;
  bool flying_ = false;  // the lane's last copy is under way
  uint32_t last_ = 0;    // its chunk
};

}  // namespace muse
