// The GEMMs of a draft: row-major weights, read once per 16 tokens. A block takes a run of 16-row groups, a warp one of
// the contract's K segments of each, four groups at a time. Where it has fewer, a step goes on in k, so that as many
// bytes are under way. Its weights come by asynchronous copies through a ring of
// its own, in which every lane reads what it fetched itself: nobody waits for anybody. The order of weights is known
// from the start, so that a ring runs ahead across GEMMs and barriers, 25 MB in all.
#pragma once

#include "ffi/draft/cuda/shared.cuh"
#include "ffi/numerics/mma.cuh"

namespace muse {

// This block's groups of a job.
__device__ __forceinline__ Range draft_groups(const DraftJob& job) {
  const int at_once = job.output == DraftOutput::kSwiglu ? 2 : 1;  // gate and up stay together
  const Range range = part(job.groups / at_once, blockIdx.x, gridDim.x);
  return {range.begin * at_once, range.end * at_once};
}

// Groups of the next batch, of `left`: four, two or one, whose steps fill a ring slot.
__device__ __forceinline__ int draft_batch(int left) { return left >= kDraftGroups ? kDraftGroups : min(left, 2); }

// Steps of k that a ring slot holds of each of a batch's groups.
__device__ __forceinline__ int draft_steps(int count) { return kDraftGroups / count; }

// The matrix of a group, and the group's number in it.
struct DraftGroup {
  int32_t matrix, group;
};
__device__ __forceinline__ DraftGroup draft_group(const DraftShared& s, const DraftJob& job, int group) {
  if (job.output == DraftOutput::kSwiglu) return {job.first + group % 2, group / 2};
  int m = job.first;
  for (int n = (s.matrix[m].rows + 15) / 16; group >= n; n = (s.matrix[m].rows + 15) / 16) group -= n, ++m;
  return {m, group};
}

// Sixteen bytes of weights, or zeros. They are read once: without the hint they push the other phases' operands and
// even the kernel's code out of L2.
__device__ __forceinline__ void copy_weights16(uint32_t shared, const void* global, bool inside, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2, %3;" ::"r"(shared), "l"(global),
               "r"(inside ? 16 : 0), "l"(policy)
               : "memory");
}

// Moves a warp's cursor to the batch after the one that it is at; by all its lanes. Apart from the loop, as all that
// follows a batch is: code that is spread over many lines of the instruction cache is what phases wait for.
__device__ __noinline__ void next_draft_batch() {
  const DraftShared& s = draft_shared();
  DraftCursor& cursor = draft_shared().fetch[threadIdx.x / 32];
  int job = cursor.job, pass = cursor.pass, group = cursor.group + cursor.count;
  bool found = false;
  if (job >= 0) {
    const Range groups = draft_groups(s.table[job]);
    if (group >= groups.end) group = groups.begin, ++pass;
    found = pass < draft_passes(s.table[job].tokens);
  }
  while (!found && ++job < s.jobs) {
    const Range groups = draft_groups(s.table[job]);
    group = groups.begin, pass = 0;
    found = groups.begin < groups.end;  // this block has a part of it
  }
  int count = 0;
  DraftGroup at{};
  if (found) {
    count = draft_batch(draft_groups(s.table[job]).end - group);
    const int piece = static_cast<int>(threadIdx.x % kDraftGroups);
    at = draft_group(s, s.table[job], group + piece % count);
  }
  __syncwarp();
  if (const int lane = static_cast<int>(threadIdx.x % 32); lane < kDraftGroups && found) {
    const DraftMatrix& m = s.matrix[at.matrix];
    cursor.w[lane] = m.w + int64_t{at.group * 16} * s.table[job].inner;
    cursor.rows[lane] = m.rows - 1 - at.group * 16;
    if (lane == 0) cursor.inner = s.table[job].inner;
  }
  if (threadIdx.x % 32 == 0) cursor.job = job, cursor.pass = pass, cursor.group = group, cursor.count = count;
  __syncwarp();
}

// Adds the segments' sums of at most two groups, [segment][2 groups][16 rows][16 tokens], and stores.
__device__ __noinline__ void store_draft_groups(int pass, int group, int count) {
  const DraftShared& s = draft_shared();
  const DraftJob& job = s.table[s.job];
  const auto* sums = reinterpret_cast<const float*>(draft_shared().region);
  const int row = threadIdx.x % 16, token = threadIdx.x / 16, i = pass * static_cast<int>(kDraftTokens) + token;
  if (i >= job.tokens) return;
  const auto total = [&](int j) {
    float segment[kSegments];
#pragma unroll
    for (int r = 0; r < kSegments; ++r) segment[r] = sums[((r * 2 + j) * 16 + row) * 16 + token];
    return tree8(segment);
  };
  if (job.output == DraftOutput::kSwiglu) {
    const int column = group / 2 * 16 + row, inner = static_cast<int>(s.call.plan.inner);
    auto* to = reinterpret_cast<uint16_t*>(s.call.workspace + s.offsets.operand[1]);
    to[draft_operand_at(i, column, inner) + column % 4] = draft_swiglu(to_bf16(total(0)), to_bf16(total(1)));
    return;
  }
#pragma unroll 1
  for (int j = 0; j < count; ++j) {
    const DraftGroup where = draft_group(s, job, group + j);
    const DraftMatrix& m = s.matrix[where.matrix];
    const int column = where.group * 16 + row;
    if (column >= m.rows) continue;
    const int64_t to = int64_t{i} * m.stride + column;
    if (job.output == DraftOutput::kHead && where.matrix == job.first)
      static_cast<float*>(m.out)[to] = total(j);
    else
      static_cast<uint16_t*>(m.out)[to] = to_bf16(total(j));
  }
}

class DraftGemm : public DraftPhases {
 public:
  __device__ explicit DraftGemm(DraftShared& shared) : DraftPhases(shared) {
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy_));
    slot_ = s_.slot;
    step_ = cursor().step, fetched_ = cursor().slot;
    aim();
  }

  // The first slots, once per launch.
  __device__ void start() {
    next_draft_batch();
    aim();
#pragma unroll 1
    for (int i = 0; i < kDraftSlots; ++i) fetch();
    leave();
  }

  // The next job of the table.
  __device__ void run() {
    const DraftJob& job = s_.table[s_.job];
    const Range groups = draft_groups(job);
#pragma unroll 1
    for (int pass = 0; pass < draft_passes(job.tokens); ++pass)
#pragma unroll 1
      for (int group = groups.begin; group < groups.end;) {
        const int count = draft_batch(groups.end - group);
        if (count == 1)
          multiply<1>(job, pass, group);
        else if (count == 2)
          multiply<2>(job, pass, group);
        else
          multiply<kDraftGroups>(job, pass, group);
        group += count;
      }
    leave();
    if (threadIdx.x == 0) ++s_.job;
    sync_block();
  }

 private:
  __device__ int segment() const { return static_cast<int>(threadIdx.x / 32); }
  __device__ DraftCursor& cursor() const { return s_.fetch[threadIdx.x / 32]; }

  // Fetching. ----------------------------------------------------------------------------------------------------

  // Pointers to the batch at the cursor: the lane's sixteen bytes of rows g and g + 8 of each piece.
  __device__ __forceinline__ void aim() {
    const DraftCursor& c = cursor();
    count_ = c.count, length_ = c.inner / kSegments;
    const int column = segment() * length_ + lane() % 4 * 8;
#pragma unroll
    for (int j = 0; j < kDraftGroups; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = min(lane() / 4 + 8 * half, c.rows[j]);  // what does not exist is not stored
        weights_[j][half] = c.w[j] + row * c.inner + column;
      }
  }

  // One slot of weights, in a copy group of its own, empty at the end of all jobs. A slot holds a step of 64 k of each
  // of four groups, or the next two of each of two, or four of one.
  __device__ __forceinline__ void fetch() {
    if (count_ > 0) {
      const uint32_t to = slot_address(fetched_);
#pragma unroll
      for (int j = 0; j < kDraftGroups; ++j) {
        const int k = (step_ + (count_ == 1 ? j : count_ == 2 ? j / 2 : 0)) * kDraftStep;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int q = 0; q < 2; ++q) {
            const bool inside = k + 32 * q + lane() % 4 * 8 < length_;
            copy_weights16(to + (((j * 2 + half) * 2 + q) * 32 + lane()) * 16,
                           weights_[j][half] + (inside ? k + 32 * q : 0), inside, policy_);
          }
      }
      step_ += draft_steps(count_);
      if (step_ * kDraftStep >= length_) {
        next_draft_batch();
        step_ = 0;
        aim();
      }
    }
    commit_copies();
    if (++fetched_ == kDraftSlots) fetched_ = 0;
  }

  __device__ uint32_t slot_address(int slot) const {
    return shared_address(s_.ring) + (segment() * kDraftSlots + slot) * kDraftSlotBytes;
  }

  // For the next call; the block's next phase begins with a barrier.
  __device__ void leave() {
    if (lane() == 0) cursor().step = step_, cursor().slot = fetched_;
    sync_block();
    if (threadIdx.x == 0) s_.slot = slot_;
    sync_block();
  }

  // Multiplying. -------------------------------------------------------------------------------------------------

  template <int kGroups>
  using Accumulators = float[kGroups][2][4];

  template <int kGroups>
  __device__ void multiply(const DraftJob& job, int pass, int group) {
    constexpr int kSteps = kDraftGroups / kGroups, kBlocks = kSteps * kDraftStep / 16;
    constexpr int kAtOnce = kBlocks < 8 ? kBlocks : 8;  // whose token operand is in registers, and the next as many
    Accumulators<kGroups> acc = {};
    const int length = job.inner / kSegments, blocks = length / 16;
    const bool both = job.tokens - pass * static_cast<int>(kDraftTokens) > 8;
    const uint4* x = at<uint4>(s_.offsets.operand[job.operand]) +
                     (int64_t{pass} * (job.inner / 16) + segment() * blocks) * 32 + lane();
    uint4 tokens[kAtOnce], next[kAtOnce];
    const auto load = [&](int block) {
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) next[e] = __ldcg(x + min(block + e, blocks - 1) * 32);
    };
    load(0);
#pragma unroll 1
    for (int block = 0; block < blocks; block += kBlocks) {
      const uint32_t from = slot_address(slot_);
#pragma unroll
      for (int two = 0; two < kBlocks / 2; ++two) {  // blocks
        if (2 * two % kAtOnce == 0) {
#pragma unroll
          for (int e = 0; e < kAtOnce; ++e) tokens[e] = next[e];
          load(block + 2 * two + kAtOnce);  // ahead, because they come from L2
        }
        if (two == 0) wait_copies<kDraftSlots - 1>();
        if (block + 2 * two >= blocks) break;
        uint32_t a[kGroups][2][4];
#pragma unroll
        for (int j = 0; j < kGroups; ++j) weights_of(from + ((two / 2 * kGroups + j) * 2 * 2 + two % 2) * 512, a[j]);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (block + 2 * two + e >= blocks) break;
          const uint4& t = tokens[2 * two % kAtOnce + e];
          const uint32_t low[2] = {t.x, t.y}, high[2] = {t.z, t.w};
#pragma unroll
          for (int j = 0; j < kGroups; ++j) mma_bf16(acc[j][0], a[j][e], low);
          if (!both) continue;
#pragma unroll
          for (int j = 0; j < kGroups; ++j) mma_bf16(acc[j][1], a[j][e], high);
        }
      }
      if (++slot_ == kDraftSlots) slot_ = 0;
      fetch();
    }
    finish<kGroups>(pass, group, acc);
  }

  // Two blocks of 16 k of a group, as the A operand: a lane fetched eight numbers that follow each other, of which four
  // are of its neighbour's block. So lane 4 g + t has the k {0, 8, 4, 12}[t] and the next three of either block.
  __device__ __forceinline__ void weights_of(uint32_t from, uint32_t (&a)[2][4]) const {
    const bool first = lane() % 4 < 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t v[4];
      asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                   : "r"(from + half * 1024 + lane() * 16));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t other = __shfl_xor_sync(~0u, first ? v[2 + i] : v[i], 2);
        a[0][half + 2 * i] = first ? v[i] : other;
        a[1][half + 2 * i] = first ? other : v[2 + i];
      }
    }
  }

  // Two groups' sums at a time into the region, for those who add and store.
  template <int kGroups>
  __device__ void finish(int pass, int group, const Accumulators<kGroups>& acc) {
    auto* sums = reinterpret_cast<float*>(s_.region);
    const int g = lane() / 4, t = lane() % 4;
#pragma unroll
    for (int j0 = 0; j0 < kGroups; j0 += 2) {
#pragma unroll
      for (int j = 0; j < 2 && j0 + j < kGroups; ++j)
#pragma unroll
        for (int b = 0; b < 2; ++b)
#pragma unroll
          for (int r = 0; r < 2; ++r)
            *reinterpret_cast<float2*>(sums + ((segment() * 2 + j) * 16 + g + 8 * r) * 16 + 8 * b + 2 * t) = {
                acc[j0 + j][b][2 * r], acc[j0 + j][b][2 * r + 1]};
      sync_block();
      store_draft_groups(pass, group + j0, min(2, kGroups));
      sync_block();
    }
  }

  uint64_t policy_;
  int slot_, fetched_, step_;  // the next to be read, the next to be filled, and with what
  int count_, length_;
  const uint16_t* weights_[kDraftGroups][2];
};

}  // namespace muse
