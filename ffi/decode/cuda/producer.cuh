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

  // Each is called by the whole warp and returns false when the block is leaving.
  __device__ bool dense(const DenseJob& job, Range range, int layer, int passes) {
    const uint32_t tasks = range.end - range.begin, chunks = job.chunks(), in_pass = tasks * chunks;
    return stream(in_pass * passes, [&](uint32_t k) {
      // Rounds of so many tasks, chunk by chunk.
      const uint32_t at = k % in_pass, round = at / (kTasksAtOnce * chunks) * kTasksAtOnce,
                     at_once = min(uint32_t{kTasksAtOnce}, tasks - round);
      const uint32_t rest = at - round * chunks, c = rest / at_once;
      const int task = range.begin + round + rest - c * at_once, segment = job.by_groups.quotient(task);
      return Piece{reinterpret_cast<const unsigned char*>(job.chunk(layer, task - segment * job.groups, segment, c)),
                   job.chunk_tiles(c) * static_cast<uint32_t>(kTile) * 2};
    });
  }

  // The experts in use, as group_pairs left them; `first`: the number of the layer's first expert.
  __device__ bool experts(const ExpertJob& job, Range range, int first) {
    const uint32_t in_round = kSegments * job.unit_groups, in_unit = in_round * job.chunks;
    return stream((range.end - range.begin) * in_unit, [&](uint32_t k) {
      const uint32_t own = k / in_unit, rest = k - own * in_unit, c = rest / in_round;
      const int unit = range.begin + own, slice = job.by_groups.quotient(unit);
      return Piece{job.unit(first + s_.expert[slice], unit - slice * job.groups) + c * job.chunk_bytes +
                       (rest - c * in_round) * job.segment_bytes,
                   static_cast<uint32_t>(job.bytes(c))};
    });
  }

  // n pieces of `bytes` at from(i) into L2.
  template <typename From>
  static __device__ __forceinline__ void prefetch(int32_t n, From from, uint32_t bytes) {
#pragma unroll 1
    for (int32_t i = threadIdx.x % 32; i < n; i += 32) ptx::bulk_prefetch_l2(from(i), bytes);
  }

  __device__ bool wait_experts_known(uint32_t layer) const { return ring_.wait_experts_known(layer); }

 private:
  struct Piece {
    const unsigned char* data;
    uint32_t bytes;
  };

  // The next `count` chunks; piece(k) is where the k-th of them lies.
  template <typename PieceOf>
  __device__ __forceinline__ bool stream(uint32_t count, PieceOf piece) {
    static_assert(kSlots == 32, "a lane per slot");
    uint32_t k = (lane_ - chunk_) % kSlots;
    Piece next{};
    bool known = false;
#pragma unroll 1
    while (true) {
      if (k < count && !known) next = piece(k), known = true;  // before its slot is free
      if (!__any_sync(~0u, known)) break;
      if (flying_ && ring_.has_landed(last_)) flying_ = false;
      const int room = (ring_.streaming() ? kCopiesInGemm : kCopiesBetween) - __popc(__ballot_sync(~0u, flying_));
      // The free slots' lanes, counted from the one whose chunk is needed first.
      const bool free = known && ring_.is_free(chunk_ + k);
      const uint32_t lanes = __ballot_sync(~0u, free),
                     first = (chunk_ + __reduce_min_sync(~0u, known ? k : ~0u)) % kSlots;
      const uint32_t before =
          (lanes >> first | lanes << (kSlots - first) % kSlots) & ((1u << ((lane_ - first) % kSlots)) - 1);
      const bool ready = free && __popc(before) < room;
      if (ready) {
        last_ = chunk_ + k;
        ring_.fetch(last_, next.data, next.bytes, policy_);
        flying_ = true;
        k += kSlots;
        known = false;
      }
      if (__any_sync(~0u, ready)) continue;
      if (ring_.leaving()) return false;
      __nanosleep(kPollInterval);
    }
    chunk_ += count;
    return true;
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
