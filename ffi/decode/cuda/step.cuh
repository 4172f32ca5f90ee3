// What every phase of the layers kernel works on: a block's shared memory, its place, and where its rank's data lies.
//
// The phases are one class in layers, each adding its own: StepBase (here), RowSteps, AttentionSteps, RouterSteps,
// ExpertSteps, and Step in layers.cu, which runs them in order.
#pragma once

#include "ffi/decode/cuda/attention.cuh"
#include "ffi/decode/cuda/column_parallel.cuh"
#include "ffi/decode/cuda/layers.h"

namespace muse {

struct LayersShared {
  DeviceRows rows;
  float partial[kSegments];
  union {
    SegmentSums sums[2];
    AttentionShared attention;
    struct {
      float keys[1024], probability[1024];
      int32_t chosen[kMaxTopK], order[kMaxTopK];
      float weight[kMaxTopK];
    } router;
    struct {
      uint16_t m[kColumns][16];
      SegmentSums sums[2];
    } experts;
    struct {
      float rho[kMaxTopK];
      int32_t expert[kMaxTopK], order[kMaxTopK];
      float weight[kMaxTopK];
    } combine;
  };
  int32_t pairs[kMaxPairs];   // (row, slot) pairs ordered by expert
  int16_t expert[kMaxPairs];  // the experts in use, ascending
  int16_t first[kMaxPairs + 1];
  int32_t used;
  float row[];  // scratch (layers_shared_bytes): a row's stream and branch, a pooled row, the chosen experts
};

class StepBase {
 public:
  __device__ StepBase(const LayersArgs& args, LayersShared& shared, Place place)
      : a_(args), p_(args.plan), w_(args.offsets), s_(shared), place_(place), me_(place.rank) {}

  __device__ uint32_t epoch() const { return place_.epoch; }

 protected:
  template <typename T>
  __device__ T* mine(int64_t offset) const {
    return reinterpret_cast<T*>(a_.workspace[me_] + offset);
  }
  template <typename T>
  __device__ T* of(int rank, int64_t offset) const {
    return reinterpret_cast<T*>(a_.workspace[rank] + offset);
  }
  __device__ float* stream(int i) const { return mine<float>(w_.stream) + i * p_.hidden; }
  __device__ const RankPointers& weights() const { return a_.rank[me_]; }

  // Slot words of `what` that source rank `source` fills at rank `rank`; `per_source` words each.
  __device__ uint64_t* slots(int rank, int64_t offset, int source, int64_t per_source) const {
    return of<uint64_t>(rank, offset) + source * per_source;
  }
  __device__ void push_all(int64_t offset, int64_t per_source, int64_t word, uint32_t data) const {
    for (int r = 0; r < kRanks; ++r) store_slot(slots(r, offset, me_, per_source) + word, data, place_.epoch);
  }

  __device__ const uint16_t* gain(int64_t l, int which) const {
    return a_.shared.hidden_gains + (3 * l + which) * p_.hidden;
  }

  const LayersArgs& a_;
  const Plan& p_;
  const Workspace& w_;
  LayersShared& s_;
  Place place_;
  const int me_;
  int n_ = 0;
};

}  // namespace muse
