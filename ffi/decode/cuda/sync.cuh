// Waiting: the barrier of one rank's blocks, and slots whose data is its own flag. No wait is unbounded: after the time
// limit the first to give up says where it stood, everybody leaves, and the communicator is broken until rebuilt.
#pragma once

#include "ffi/decode/cuda/block.cuh"
#include "ffi/decode/workspace.h"

namespace muse {

// A block's view of its rank, the time and how far it is; in shared memory, and changed by thread 0 only, but for the
// last.
struct Place {
  unsigned char* const* workspace;  // of all ranks
  Control* control;                 // of this rank
  Report* report;
  uint64_t deadline;           // globaltimer, ns
  uint32_t rank, index, size;  // block `index` of `size` that serve this rank
  uint32_t first[8];           // the block's first unit in a phase that starts at so many eighths of the blocks
  uint32_t layer, epoch;       // of the exchanges in this layer
  uint32_t arrivals;           // at the rank's barriers, ever, once all blocks have come to the last one
  uint32_t chunk;              // of the weight ring, at the start of the phase
  uint32_t unit;               // of the experts', likewise
  uint32_t dense;              // dense passes that the finishing warps helped with
  uint32_t events;             // of the timeline, so far
  volatile uint32_t gave_up;   // some thread of the block waited too long
};

// A slot's word: data, and above them the epoch that they are of; whoever waits for them finds it stale until then.
__device__ __forceinline__ uint64_t slot_word(uint32_t data, uint32_t epoch) {
  return static_cast<uint64_t>(epoch) << 32 | data;
}
__device__ __forceinline__ bool is_stale(uint64_t word, uint32_t epoch) {
  return static_cast<uint32_t>(word >> 32) != epoch;
}
__device__ __forceinline__ float slot_number(uint64_t word) { return bit_cast<float>(static_cast<uint32_t>(word)); }

__device__ __forceinline__ void store_slot(uint64_t* slot, uint32_t data, uint32_t epoch) {
  ptx::store_relaxed_sys(slot, slot_word(data, epoch));
}

// What the block stored before it met is there for whoever sees a slot that this thread stores next, and the other way
// round: a slot that it saw brings what lies behind it.
__device__ __forceinline__ void fence_rank() { ptx::fence_acq_rel_gpu(); }

constexpr uint64_t kReportGrace = 100'000'000;  // ns

// The first of a rank to give up reports (the report lies in host memory, which has no device atomics) and tells all
// ranks, so that nobody waits out a limit of his own.
inline __device__ __noinline__ void give_up(const Place& place, ReportCode code, Phase phase, uint32_t source) {
  if (atomicCAS(&place.control->abort, 0u, 1u) != 0u) return;
  place.report->layer = place.layer;
  place.report->phase = phase;
  place.report->source = source;
  __threadfence_system();
  place.report->code = code;
  __threadfence_system();
  // Limits run out everywhere at about the same time, and who waits for the culprit may not be the first.
  if (code == kTimedOut)
    for (const uint64_t until = ptx::globaltimer() + kReportGrace; ptx::globaltimer() < until;) {
    }
  for (int r = 0; r < kRanks; ++r) {
    uint32_t* abort = &reinterpret_cast<Control*>(place.workspace[r])->abort;
    ptx::store_relaxed_sys(abort, 1u);
  }
  __threadfence_system();
}

// Blocks at their rank's barrier give those who wait for another rank time to report first: they know whom.
constexpr uint64_t kBarrierGrace = 250'000'000;  // ns
// Likewise who waits for sums that a rank cannot make because it waits itself; longer than kReportGrace.
constexpr uint64_t kBranchGrace = 125'000'000;

// Looked at now and then by whoever spins.
inline __device__ __noinline__ bool should_leave(const Place& place, Phase phase, uint32_t source, uint64_t grace = 0) {
  if (ptx::load_relaxed_sys(&place.control->abort)) return true;
  if (ptx::globaltimer() < place.deadline + grace) return false;
  give_up(place, kTimedOut, phase, source);
  return true;
}

// Looks again and again until nothing is missing or somebody has given up: then what was waited for is without sense,
// and the next barrier says so. look(): something that is missing, negative if nothing is; source(missing): the rank
// that it must come from.
template <typename Look, typename Source>
__device__ __forceinline__ void wait_until(Place& place, Phase phase, uint64_t grace, Look look, Source source) {
  for (uint32_t spins = 1; !place.gave_up; ++spins) {
    const int missing = look();
    if (missing < 0) return;
    if (spins % 64 == 0 && should_leave(place, phase, source(missing), grace)) place.gave_up = 1;
  }
}

// The data of N slots, all loads in flight together. The last that does not have it yet, or -1.
template <int N, typename Slot>
__device__ __forceinline__ int load_slots(uint32_t epoch, Slot slot, uint32_t (&data)[N]) {
  uint64_t word[N];
#pragma unroll
  for (int r = 0; r < N; ++r) word[r] = ptx::load_relaxed_sys(slot(r));
  int missing = -1;
#pragma unroll
  for (int r = 0; r < N; ++r) {
    data[r] = static_cast<uint32_t>(word[r]);
    if (is_stale(word[r], epoch)) missing = r;
  }
  return missing;
}

// tree8 of the numbers in eight slots, `stride` words apart: of rank `source`, or, where that is negative, one of each
// rank. One piece of code for all who wait so.
inline __device__ __noinline__ float wait_sum(Place& place, Phase phase, const uint64_t* slot, int stride, int source,
                                              uint64_t grace = 0) {
  const uint32_t epoch = place.epoch;
  uint32_t data[kSegments] = {};
  wait_until(
      place, phase, grace, [&] { return load_slots(epoch, [&](int r) { return slot + r * stride; }, data); },
      [&](int missing) { return source < 0 ? missing : source; });
  float s[kSegments];
#pragma unroll
  for (int r = 0; r < kSegments; ++r) s[r] = bit_cast<float>(data[r]);
  return tree8(s);
}

// Two neighbouring columns of which there are eight segments' sums in slots, `stride` words apart, of this rank or one
// of each rank: added and rounded.
inline __device__ __noinline__ uint32_t wait_segments(Place& place, Phase phase, const uint64_t* slot, int stride,
                                                      uint32_t epoch, bool of_ranks = false) {
  float s[2][kSegments] = {};
  const auto look = [&] {
    uint64_t word[kSegments][2];
#pragma unroll
    for (int r = 0; r < kSegments; ++r)  // each of the two is read at once, which is enough
      ptx::load_relaxed_sys_v2(slot + r * stride, word[r]);
    int missing = -1;
#pragma unroll
    for (int r = 0; r < kSegments; ++r)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        s[c][r] = slot_number(word[r][c]);
        if (is_stale(word[r][c], epoch)) missing = r;
      }
    return missing;
  };
  wait_until(place, phase, of_ranks ? 0 : kBarrierGrace, look,
             [&](int missing) { return of_ranks ? static_cast<uint32_t>(missing) : place.rank; });
  return static_cast<uint32_t>(to_bf16(tree8(s[0]))) | static_cast<uint32_t>(to_bf16(tree8(s[1]))) << 16;
}

// The data of n pairs of slots, of at most eight, `stride` words apart, to shared memory: pairs `to_stride` words
// apart, a pair's second word `to_next` behind the first. Sources as in wait_sum.
inline __device__ __noinline__ void wait_pairs(Place& place, Phase phase, const uint64_t* slot, int stride, int n,
                                               int source, uint32_t* to, int to_stride, int to_next,
                                               uint64_t grace = 0) {
  const uint32_t epoch = place.epoch;
  const auto look = [&] {
    uint64_t word[kSegments][2];
#pragma unroll
    for (int r = 0; r < kSegments; ++r) ptx::load_relaxed_sys_v2(slot + min(r, n - 1) * stride, word[r]);
    int missing = -1;
#pragma unroll
    for (int r = 0; r < kSegments; ++r)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        to[min(r, n - 1) * to_stride + e * to_next] = static_cast<uint32_t>(word[r][e]);
        if (is_stale(word[r][e], epoch)) missing = r;
      }
    return missing;
  };
  wait_until(place, phase, grace, look, [&](int missing) { return source < 0 ? min(missing, n - 1) : source; });
}

// The last arrival of all blocks of the rank that this one has counted. The count runs on through all launches and
// wraps around: the arrivals that are missing, minus one. load(counter): how it is looked at.
template <typename Load>
__device__ __forceinline__ void wait_arrivals(Place& place, Phase phase, Load load) {
  const uint32_t target = place.arrivals;
  wait_until(
      place, phase, kBarrierGrace, [&] { return static_cast<int32_t>(target - load(&place.control->barrier)) - 1; },
      [&](int) { return place.rank; });
}

// The block is past a point, says one thread behind a meeting of the block; whoever is to know waits for everybody's,
// before the block's next arrival. Nothing is released by it and nothing acquired, so that it costs no fence: all that
// it tells is that what the block waited for before has been read (workspace.h).
__device__ __forceinline__ void arrive(Place& place) {
  ptx::add_relaxed_gpu(&place.control->barrier);
  place.arrivals += place.size;
}
inline __device__ __noinline__ void wait_arrived(Place& place, Phase phase) {
  wait_arrivals(place, phase, [](const uint32_t* counter) { return ptx::load_relaxed_sys(counter); });
}

// All blocks of the rank; what they wrote before is visible after. False: somebody gave up, leave the kernel.
__device__ __forceinline__ bool rank_barrier(Place& place, Phase phase) {
  sync_block();
  if (thread_index() == 0) {
    ptx::add_release_gpu(&place.control->barrier);
    place.arrivals += place.size;
    wait_arrivals(place, phase, [](const uint32_t* counter) { return ptx::load_acquire_gpu(counter); });
  }
  sync_block();
  return !place.gave_up;
}

}  // namespace muse
