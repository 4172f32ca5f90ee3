// What every phase of a fused kernel works on: a block's shared memory, its place, its view of the weight ring, and
// where its rank's data lies.
//
// The phases of the layers kernel are one class in layers, each adding its own: StepBase (here), OperandSteps,
// DenseSteps, RowSteps, AttentionSteps, RouterSteps, ExpertSteps, and Step in layers.cu, which runs them in order.
#pragma once

#include "ffi/decode/cuda/attention_schedule.cuh"
#include "ffi/decode/cuda/launches.h"
#include "ffi/decode/cuda/norms.cuh"
#include "ffi/decode/cuda/ring.cuh"
#include "ffi/decode/cuda/rows.cuh"
#include "ffi/decode/cuda/schedule.h"
#include "ffi/decode/cuda/sync.cuh"
#include "ffi/decode/cuda/unit_queue.cuh"

namespace muse {

// The chosen experts of some of a pass's rows, in each row by ascending id.
struct ExpertTerms {
  float2 term[kPassRows * kMaxTopK];    // weight and rho
  int32_t place[kPassRows * kMaxTopK];  // of the expert's output
  // By pair, `at`: which term it is.
  int16_t expert[kPassRows * kMaxTopK], at[kPassRows * kMaxTopK];
};

// How far another rank's workspace is from one's own, in bytes, and as whose what is stored there counts: one's own,
// or, alone on its own (loopback), that rank's: a rank then plays all its peers.
struct Peer {
  int64_t distance;
  int32_t source;
};

// A block's shared memory. What stays the same for the whole launch is here too: registers are for the tensor cores.
struct BlockShared {
  RingShared ring;
  UnitQueueShared units;
  StepArgs args;
  Place place;
  Workspace own;      // of the rank, addresses instead of offsets
  Peer peer[kRanks];  // the other workspaces, seen from there
  Jobs jobs;
  DeviceRows rows;
  AttentionSchedule attention;
  float partial[kSegments];
  float scale[kPassRows];  // 1 / rms of a pass's rows
  // The experts in use, ascending, in slices of at most eight (row, slot) pairs: the columns of one tensor-core tile.
  uint16_t pairs[kMaxPairs];  // by expert
  int16_t expert[kMaxPairs];
  int16_t first[kMaxPairs + 1];
  int32_t slices;
  Range expert_units[2];  // of the block, in the two GEMMs
  ExpertTerms terms;
  // Which GEMM is next, dense and of the experts. Phases are told here: arguments that a phase keeps for later would be
  // spilled (layers.cu).
  Gemm gemm;
  bool second;
  alignas(128) unsigned char region[];  // what the phases use in turn
};

// What a stamp of the timeline ends; kWait: the barrier after it.
enum class Mark : uint8_t {
  kWait,
  kStart,
  kLoad,
  kProject,
  kHeads,
  kAttend,
  kOutput,
  kReduce,
  kBranch,
  kPool,
  kRoute,
  kGroup,
  kFirst,
  kTokens,
  kSecond
};

__device__ __forceinline__ uint32_t pack(uint16_t low, uint16_t high) {
  return static_cast<uint32_t>(low) | static_cast<uint32_t>(high) << 16;
}
__device__ __forceinline__ float low_bf16(uint32_t two) { return from_bf16(static_cast<uint16_t>(two)); }
__device__ __forceinline__ float high_bf16(uint32_t two) { return from_bf16(static_cast<uint16_t>(two >> 16)); }

extern __shared__ __align__(128) unsigned char block_memory[];

// Named, not passed: the compiler then knows that it is shared memory.
__device__ __forceinline__ BlockShared& block_shared() { return *reinterpret_cast<BlockShared*>(block_memory); }

// Pointers that come out of shared memory could point anywhere; these are global.
template <typename T>
__device__ __forceinline__ T* global(T* p) {
  __builtin_assume(__isGlobal(p));
  return p;
}

// Runs one phase as a function of its own, so that the compiler shares out registers phase by phase instead of keeping
// one phase's numbers through the others.
template <auto kPhase, typename Steps, typename Result, typename... Args>
__device__ __noinline__ Result run_phase_of(Result (Steps::*)(Args...), Args... args) {
  return (Steps(block_shared()).*kPhase)(args...);
}
template <auto kPhase, typename... Args>
__device__ __forceinline__ auto run_phase(Args... args) {
  return run_phase_of<kPhase>(kPhase, args...);
}

class StepBase {
 public:
  __device__ explicit StepBase(BlockShared& shared)
      : a_(shared.args),
        p_(shared.args.plan),
        w_(shared.own),
        s_(shared),
        place_(shared.place),
        ring_(shared.ring),
        units_(shared.units) {}

 protected:
  // 32-bit forms of what fits: 64-bit products and quotients are long code.
  __device__ int layer() const { return static_cast<int>(place_.layer); }
  __device__ int rows() const { return s_.rows.count; }
  __device__ int me() const { return static_cast<int>(place_.rank); }
  __device__ int hidden() const { return static_cast<int>(p_.hidden); }
  __device__ int moe_hidden() const { return static_cast<int>(p_.moe_hidden); }
  __device__ int top_k() const { return static_cast<int>(p_.top_k); }
  __device__ int blocks() const { return static_cast<int>(place_.size); }
  __device__ int block() const { return static_cast<int>(place_.index); }

  // The first unit of this block in a phase that has few: phases start at different eighths of the blocks, because no
  // multiprocessor should need the code of them all. The instruction cache holds about 128 KB.
  __device__ int first_unit(int eighth) const { return place_.first[eighth]; }

  template <typename T>
  __device__ T* mine(int64_t address) const {
    return global(reinterpret_cast<T*>(address));
  }
  template <typename T>
  __device__ T* region(int bytes = 0) const {
    return reinterpret_cast<T*>(s_.region + bytes);
  }
  __device__ float* stream(int i) const { return mine<float>(w_.stream) + i * hidden(); }
  __device__ const RankPointers& weights() const { return a_.rank[me()]; }

  // Slot words at `address` that source rank `source` filled here; `per_source` words each.
  __device__ const uint64_t* slots_from(int source, int64_t address, int per_source) const {
    return mine<uint64_t>(address) + source * per_source;
  }
  // Where this rank stores for rank `to` what lies at `address` in its own workspace.
  __device__ uint64_t* slots_to(int to, int64_t address, int per_source) const {
    const Peer& peer = s_.peer[to];
    return mine<uint64_t>(address + peer.distance) + peer.source * per_source;
  }
  __device__ void push_all(int64_t address, int per_source, int word, uint32_t data) const {
    const uint32_t epoch = place_.epoch;
#pragma unroll 1  // short code: it mostly runs once, out of a cold instruction cache
    for (int r = 0; r < kRanks; ++r) store_slot(slots_to(r, address, per_source) + word, data, epoch);
  }
  // A new round of exchanges; all threads have read the old number at a barrier before, and read the new one after one.
  __device__ void next_epoch() {
    if (thread_index() == 0) ++place_.epoch;
    sync_block();
  }
  // The block has come to a point where others may rely on that (sync.cuh).
  __device__ void arrive() {
    sync_block();
    if (thread_index() == 0) muse::arrive(place_);
  }
  // A stamp of the timeline: what ended here. Nothing unless the build asks for it.
  __device__ __forceinline__ void mark([[maybe_unused]] Mark what) {
#ifdef MUSE_TIMELINE
    if (thread_index() == 0 && place_.index < kTimelineBlocks && place_.events < kTimelineEvents)
      mine<uint64_t>(w_.timeline)[place_.index * kTimelineEvents + place_.events++] =
          static_cast<uint64_t>(clock64()) << 8 | static_cast<uint64_t>(what);
#endif
  }

  // N slots' data. slot(r) and source(r) say where and from whom; grace: kBranchGrace.
  template <int N, typename Slot, typename Source>
  __device__ __forceinline__ void wait(Phase phase, Slot slot, Source source, uint32_t (&data)[N], uint64_t grace = 0) {
    const uint32_t epoch = place_.epoch;
    wait_until(place_, phase, grace, [&] { return load_slots(epoch, slot, data); }, source);
  }

  // False: somebody gave up, leave the kernel.
  __device__ bool all_alive() {
    sync_block();
    return leave_if(place_.gave_up);
  }
  __device__ bool rank_barrier(Phase phase) {
    const bool alive = leave_if(!run_phase<&StepBase::meet>(phase));
    mark(Mark::kWait);
    return alive;
  }

  // Which row-parallel exchange is under way: o_proj's, 0, or post_expert_proj's, 1.
  __device__ int exchange() const { return s_.gemm != Gemm::kPreExpert; }

  __device__ const uint16_t* gain(int which) const {
    return global(a_.shared.hidden_gains) + (3 * layer() + which) * hidden();
  }

  const StepArgs& a_;
  const Plan& p_;
  const Workspace& w_;
  BlockShared& s_;
  Place& place_;
  const Ring ring_;
  const UnitQueue units_;

 private:
  __device__ bool meet(Phase phase) { return muse::rank_barrier(place_, phase); }
  __device__ bool leave_if(bool gave_up) {
    if (gave_up) ring_.leave();
    return !gave_up;
  }
};

}  // namespace muse
