// What every phase of a fused kernel works on: a block's shared memory, its place, its view of the weight ring, and
// where its rank's data lies.
//
// The phases of the layers kernel are one class in layers, each adding its own: StepBase (here), DenseSteps, RowSteps,
// AttentionSteps, RouterSteps, ExpertSteps, and Step in layers.cu, which runs them in order.
#pragma once

#include "ffi/decode/cuda/launches.h"
#include "ffi/decode/cuda/norms.cuh"
#include "ffi/decode/cuda/ring.cuh"
#include "ffi/decode/cuda/rows.cuh"
#include "ffi/decode/cuda/sync.cuh"

namespace muse {

// A block's shared memory. What stays the same for the whole launch is here too: registers are for the tensor cores.
struct BlockShared {
  RingShared ring;
  StepArgs args;
  Place place;
  DeviceRows rows;
  float partial[kSegments];
  // The experts in use, ascending, in slices of at most eight (row, slot) pairs: the columns of one tensor-core tile.
  uint16_t pairs[kMaxPairs];  // by expert
  int16_t expert[kMaxPairs];
  int16_t first[kMaxPairs + 1];
  int32_t slices;
  int32_t flag;  // what one thread found out for all
  alignas(128) unsigned char region[];  // what the phases use in turn
};

class StepBase {
 public:
  __device__ explicit StepBase(BlockShared& shared)
      : a_(shared.args),
        p_(shared.args.plan),
        w_(shared.args.offsets),
        s_(shared),
        place_(shared.place),
        ring_(shared.ring) {}

 protected:
  __device__ int rows() const { return s_.rows.count; }
  __device__ int me() const { return static_cast<int>(place_.rank); }
  template <typename T>
  __device__ T* mine(int64_t offset) const {
    return reinterpret_cast<T*>(a_.workspace[me()] + offset);
  }
  template <typename T>
  __device__ T* region(int64_t bytes = 0) const {
    return reinterpret_cast<T*>(s_.region + bytes);
  }
  __device__ float* stream(int i) const { return mine<float>(w_.stream) + i * p_.hidden; }
  __device__ const RankPointers& weights() const { return a_.rank[me()]; }

  // Slot words of `what` that source rank `source` filled here; `per_source` words each.
  __device__ const uint64_t* slots_from(int source, int64_t offset, int64_t per_source) const {
    return mine<uint64_t>(offset) + source * per_source;
  }
  // A new round of exchanges; all threads have read the old number at a barrier before, and read the new one after one.
  __device__ void next_epoch() {
    if (thread_index() == 0) ++place_.epoch;
    sync_block();
  }
  // Where this rank, or a part of a row that it owns, stores for rank `to`. Alone on its own (loopback), a rank plays
  // all its peers: what it would send them it stores as if they had sent it.
  __device__ uint64_t* slots_to(int to, int64_t offset, int64_t per_source) const {
    return reinterpret_cast<uint64_t*>(a_.workspace[to] + offset) + (a_.loopback ? to : me()) * per_source;
  }
  __device__ void push_all(int64_t offset, int64_t per_source, int64_t word, uint32_t data) const {
#pragma unroll
    for (int r = 0; r < kRanks; ++r) store_slot(slots_to(r, offset, per_source) + word, data, place_.epoch);
  }
  // N slots' data, all loads in flight together. slot(r) and source(r) say where and from whom. Without data when
  // somebody gave up: the next barrier says so.
  template <int N, typename Slot, typename Source>
  __device__ __forceinline__ void wait(Phase phase, Slot slot, Source source, uint32_t (&data)[N]) {
    const uint32_t epoch = place_.epoch;
    for (uint32_t spins = 1; !place_.gave_up; ++spins) {
      uint64_t word[N];
#pragma unroll
      for (int r = 0; r < N; ++r) word[r] = load_slot(slot(r));
      int missing = -1;
#pragma unroll
      for (int r = 0; r < N; ++r) {
        data[r] = static_cast<uint32_t>(word[r]);
        if (static_cast<uint32_t>(word[r] >> 32) != epoch) missing = r;
      }
      if (missing < 0) return;
      if (spins % 64 == 0 && should_leave(place_, phase, source(missing))) place_.gave_up = 1;
    }
  }

  // False: somebody gave up, leave the kernel.
  __device__ bool all_alive() {
    sync_block();
    return leave_if(place_.gave_up);
  }
  __device__ bool rank_barrier(Phase phase) { return leave_if(!muse::rank_barrier(place_, phase)); }

  __device__ const uint16_t* gain(int64_t l, int which) const {
    return a_.shared.hidden_gains + (3 * l + which) * p_.hidden;
  }

  const StepArgs& a_;
  const Plan& p_;
  const Workspace& w_;
  BlockShared& s_;
  Place& place_;
  const Ring ring_;

 private:
  __device__ bool leave_if(bool gave_up) {
    if (gave_up) ring_.leave();
    return !gave_up;
  }
};

}  // namespace muse
