// A block of the draft kernel: its shared memory, where it stands, and what its phases work on.
#pragma once

#include "ffi/decode/cuda/schedule.h"
#include "ffi/decode/cuda/sync.cuh"
#include "ffi/draft/draft.h"
#include "ffi/draft/row.h"
#include "ffi/draft/workspace.h"
#include "ffi/ops/shared_memory.cuh"

namespace muse {

constexpr int kDraftSlots = 2;   // of a warp's weight ring
constexpr int kDraftGroups = 4;  // 16-row groups of weights that a warp multiplies at once
constexpr int kDraftStep = 64;   // k of a piece of a slot
constexpr int kDraftPieceBytes = 16 * kDraftStep * 2, kDraftSlotBytes = kDraftGroups * kDraftPieceBytes;
constexpr int kDraftRingBytes = kWarps * kDraftSlots * kDraftSlotBytes;
constexpr int kDraftRegionBytes = kWarps * kDraftGroups * 16 * 16 * 4;  // at least, what phases use in turn: sums

// One weight matrix [rows, inner] of a GEMM, and where its outputs go.
struct DraftMatrix {
  const uint16_t* w;
  void* out;
  int32_t rows, stride;
};

enum class DraftOutput : int32_t { kBf16, kSwiglu, kHead };

// A GEMM over the same operand: matrices one after the other, or two of them group by group (gate, up).
struct DraftJob {
  int64_t operand;
  int32_t first, groups, inner, tokens;
  DraftOutput output;
};

constexpr int kMaxDraftJobs = 3 + 6 * kMaxDraftLayers, kMaxDraftMatrices = 3 + 11 * kMaxDraftLayers;

// How far a warp has fetched: the job, pass and first group of the batch that it is at, the next step of k and the next
// slot. Of the batch: its groups (0: there are no more), its inner dimension, and where each piece of a slot begins.
struct DraftCursor {
  int32_t job, pass, group, step, slot;
  int32_t count, inner;
  int32_t rows[kDraftGroups];  // after the piece's first row
  const uint16_t* w[kDraftGroups];
};

struct DraftShared {
  alignas(128) unsigned char ring[kDraftRingBytes];
  DraftCall call;
  Place place;                        // `layer` is the draft's
  unsigned char* workspaces[kRanks];  // of this call alone: nobody else waits for it
  DraftWorkspace offsets;
  int32_t jobs, job;  // how many, and which is next
  DraftCursor fetch[kWarps];
  int32_t slot;   // the next to be read
  bool going_on;  // all blocks came to the last barrier
  DraftJob table[kMaxDraftJobs];
  DraftMatrix matrix[kMaxDraftMatrices];
  int32_t position[kChunkKeys];
  alignas(128) unsigned char region[];
};

extern __shared__ __align__(128) unsigned char draft_memory[];
__device__ __forceinline__ DraftShared& draft_shared() { return *reinterpret_cast<DraftShared*>(draft_memory); }

// Words that are their own flags (workspace.h): until a word has come, all its bits are set, which is a NaN, as two
// bf16 numbers or as an fp32 one, that no arithmetic makes.
constexpr uint32_t kUnset = ~0u;
__device__ __forceinline__ uint32_t to_word(uint32_t data) { return data == kUnset ? 0x7FFF7FFFu : data; }
__device__ __forceinline__ bool is_set(uint32_t word) { return word != kUnset; }
__device__ __forceinline__ bool is_set(const uint4& v) {
  return is_set(v.x) && is_set(v.y) && is_set(v.z) && is_set(v.w);
}
__device__ __forceinline__ uint32_t load_word(const void* p) {
  return ptx::load_relaxed_gpu(static_cast<const uint32_t*>(p));
}
__device__ __forceinline__ uint4 load_words(const void* p) {
  return ptx::load_relaxed_gpu_v4(static_cast<const uint32_t*>(p));
}
__device__ __forceinline__ void store_word(void* p, uint32_t data) {
  ptx::store_relaxed_gpu(static_cast<uint32_t*>(p), to_word(data));
}

// Where two numbers, of row i and columns k (even) and k + 1, lie in a GEMM's operand: the order in which lanes hold
// the B operand of mma.m16n8k16, a tile of eight rows after the other.
__device__ __forceinline__ int64_t draft_operand_at(int i, int k, int inner) {
  const int lane = i % 8 * 4 + k % 8 / 2;
  return ((int64_t{i / 8} * (inner / 16) + k / 16) * 32 + lane) * 4 + k % 16 / 8 * 2;
}

__device__ __forceinline__ uint32_t two_bf16(uint16_t low, uint16_t high) {
  return static_cast<uint32_t>(low) | static_cast<uint32_t>(high) << 16;
}
__device__ __forceinline__ uint16_t half_of(uint32_t word, int which) {
  return static_cast<uint16_t>(which ? word >> 16 : word);
}
__device__ __forceinline__ uint16_t element(const uint4& v, int j) {
  const uint32_t word = j < 2 ? v.x : j < 4 ? v.y : j < 6 ? v.z : v.w;
  return half_of(word, j & 1);
}

// What all phases see.
class DraftPhases {
 public:
  __device__ explicit DraftPhases(DraftShared& shared) : c_(shared.call), p_(shared.call.plan), s_(shared) {}

 protected:
  template <typename T>
  __device__ T* at(int64_t offset) const {
    return reinterpret_cast<T*>(c_.workspace + offset);
  }
  __device__ int block() const { return static_cast<int>(blockIdx.x); }
  __device__ int blocks() const { return static_cast<int>(gridDim.x); }
  __device__ int thread() const { return static_cast<int>(blockIdx.x * kThreads + threadIdx.x); }
  __device__ int threads() const { return static_cast<int>(gridDim.x) * kThreads; }
  // Warps of all blocks, numbered so that neighbours are in different blocks.
  __device__ int warp() const { return static_cast<int>(threadIdx.x / 32 * gridDim.x + blockIdx.x); }
  __device__ int warps() const { return static_cast<int>(gridDim.x) * kWarps; }
  __device__ int lane() const { return static_cast<int>(threadIdx.x % 32); }
  __device__ int hidden() const { return static_cast<int>(p_.hidden); }
  __device__ int l() const { return static_cast<int>(s_.place.layer); }
  __device__ const DraftLayer& layer() const { return c_.layer[l()]; }

  // Until look() finds nothing missing (sync.cuh), or somebody gave up.
  template <typename Look>
  __device__ __forceinline__ void wait_until_there(Look look) {
    wait_until(s_.place, Phase::kHead, kBarrierGrace, look, [](int) { return 0u; });
  }
  // `v`, which `load` has read, again and again until it is there.
  template <typename T, typename Load>
  __device__ __forceinline__ void wait_for(T& v, Load load) {
    const auto look = [&] {
      if (is_set(v)) return -1;
      v = load();
      return 0;
    };
    wait_until_there(look);
  }
  __device__ __forceinline__ uint32_t wait_word(const void* p) {
    uint32_t v = load_word(p);
    wait_for(v, [p] { return load_word(p); });
    return v;
  }

  const DraftCall& c_;
  const DraftPlan& p_;
  DraftShared& s_;
};

}  // namespace muse
