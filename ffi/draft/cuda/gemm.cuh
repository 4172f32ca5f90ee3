// The GEMMs of a draft: row-major weights, read once per 16 tokens. A block takes a run of 16-row groups, a warp one of
// the contract's K segments of each, four groups at a time. Its weights come by asynchronous copies through a ring of
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

// Groups of the next batch, of `left`: even batches, because each reads the operand once.
__device__ __forceinline__ int draft_batch(const DraftJob& job, int left) {
  if (job.output == DraftOutput::kSwiglu) return min(left, kDraftGroups);
  const int batches = (left + kDraftGroups - 1) / kDraftGroups;
  return (left + batches - 1) / batches;
}

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

class DraftGemm : public DraftPhases {
 public:
  __device__ explicit DraftGemm(DraftShared& shared) : DraftPhases(shared) {
    cursor_ = s_.fetch[threadIdx.x / 32];
    slot_ = s_.slot;
    if (cursor_.job < s_.jobs) aim();
  }

  // The first slots, once per launch.
  __device__ void start() {
    cursor_.job = -1, cursor_.slot = 0;
    next_job();
#pragma unroll 1
    for (int i = 0; i < kDraftSlots; ++i) fetch();
    leave();
  }

  // The next job of the table.
  __device__ void run() {
    const DraftJob job = s_.table[s_.job];
    const Range groups = draft_groups(job);
#pragma unroll 1
    for (int pass = 0; pass < draft_passes(job.tokens); ++pass)
#pragma unroll 1
      for (int group = groups.begin; group < groups.end;) {
        const int count = draft_batch(job, groups.end - group);
        multiply(job, pass, group, count);
        group += count;
      }
    leave();
    if (threadIdx.x == 0) ++s_.job;
    sync_block();
  }

 private:
  __device__ int segment() const { return static_cast<int>(threadIdx.x / 32); }

  // Fetching. ----------------------------------------------------------------------------------------------------

  // The next job of which this block has a part, at its first step.
  __device__ void next_job() {
    do {
      if (++cursor_.job >= s_.jobs) return;
      const Range groups = draft_groups(s_.table[cursor_.job]);
      cursor_.group = groups.begin;
      if (groups.begin < groups.end) break;
    } while (true);
    cursor_.pass = cursor_.step = 0;
    aim();
  }

  // Pointers to the batch at the cursor: each lane's sixteen bytes of rows g and g + 8 of each group.
  __device__ void aim() {
    const DraftJob& job = s_.table[cursor_.job];
    count_ = draft_batch(job, draft_groups(job).end - cursor_.group);
    length_ = job.inner / kSegments;
    const int g = lane() / 4;
#pragma unroll
    for (int j = 0; j < kDraftGroups; ++j) {
      const DraftGroup at = draft_group(s_, job, cursor_.group + min(j, count_ - 1));
      const DraftMatrix& m = s_.matrix[at.matrix];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = min(at.group * 16 + g + 8 * half, m.rows - 1);  // what does not exist is not stored
        weights_[j][half] = m.w + int64_t{row} * job.inner + segment() * length_ + lane() % 4 * 8;
      }
    }
  }

  // One step into the next slot, in a copy group of its own, empty at the end of all jobs.
  __device__ __forceinline__ void fetch() {
    if (cursor_.job < s_.jobs) {
      const uint32_t to = slot_address(cursor_.slot);
      const int k = cursor_.step * kDraftStep;
#pragma unroll
      for (int j = 0; j < kDraftGroups; ++j)
        if (j < count_)
#pragma unroll
          for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int q = 0; q < 2; ++q) {
              const bool inside = k + 32 * q + lane() % 4 * 8 < length_;
              copy_async16(to + (((j * 2 + half) * 2 + q) * 32 + lane()) * 16,
                           weights_[j][half] + (inside ? k + 32 * q : 0), inside);
            }
      advance();
    }
    commit_copies();
    if (++cursor_.slot == kDraftSlots) cursor_.slot = 0;
  }

  __device__ __forceinline__ void advance() {
    if (++cursor_.step * kDraftStep < length_) return;
    cursor_.step = 0;
    const DraftJob& job = s_.table[cursor_.job];
    const Range groups = draft_groups(job);
    cursor_.group += count_;
    if (cursor_.group >= groups.end) {
      cursor_.group = groups.begin;
      if (++cursor_.pass >= draft_passes(job.tokens)) return next_job();
    }
    aim();
  }

  __device__ uint32_t slot_address(int slot) const {
    return shared_address(s_.ring) + (segment() * kDraftSlots + slot) * kDraftSlotBytes;
  }

  // For the next call; the block's next phase begins with a barrier.
  __device__ void leave() {
    if (lane() == 0) s_.fetch[threadIdx.x / 32] = cursor_;
    sync_block();
    if (threadIdx.x == 0) s_.slot = slot_;
    sync_block();
  }

  // Multiplying. -------------------------------------------------------------------------------------------------

  static constexpr int kStepBlocks = kDraftStep / 16;
  using Accumulators = float[kDraftGroups][2][4];

  __device__ void multiply(const DraftJob& job, int pass, int group, int count) {
    Accumulators acc = {};
    const int length = job.inner / kSegments, blocks = length / 16;
    const bool both = job.tokens - pass * static_cast<int>(kDraftTokens) > 8;
    const uint4* x = at<uint4>(s_.offsets.operand[job.operand]) +
                     (int64_t{pass} * (job.inner / 16) + segment() * blocks) * 32 + lane();
    uint4 tokens[kStepBlocks], next[kStepBlocks];
    const auto load = [&](int block) {
#pragma unroll
      for (int e = 0; e < kStepBlocks; ++e) next[e] = __ldcg(x + min(block + e, blocks - 1) * 32);
    };
    load(0);
#pragma unroll 1
    for (int block = 0; block < blocks; block += kStepBlocks) {
#pragma unroll
      for (int e = 0; e < kStepBlocks; ++e) tokens[e] = next[e];
      load(block + kStepBlocks);  // a step ahead: they come from L2
      wait_copies<kDraftSlots - 1>();
      const uint32_t from = slot_address(slot_);
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        if (block + 2 * q >= blocks) break;
        uint32_t a[kDraftGroups][2][4];
#pragma unroll
        for (int j = 0; j < kDraftGroups; ++j)
          weights_of(from + (j * 2 * 2 + q) * 512, a[j]);  // of all groups, or junk
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (block + 2 * q + e >= blocks) break;
          const uint4& t = tokens[2 * q + e];
          const uint32_t low[2] = {t.x, t.y}, high[2] = {t.z, t.w};
#pragma unroll
          for (int j = 0; j < kDraftGroups; ++j)
            if (j < count) mma_bf16(acc[j][0], a[j][e], low);
          if (!both) continue;
#pragma unroll
          for (int j = 0; j < kDraftGroups; ++j)
            if (j < count) mma_bf16(acc[j][1], a[j][e], high);
        }
      }
      if (++slot_ == kDraftSlots) slot_ = 0;
      fetch();
    }
    finish(job, pass, group, count, acc);
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

  // Adds the segments, two groups at a time, and stores.
  __device__ void finish(const DraftJob& job, int pass, int group, int count, const Accumulators& acc) {
    auto* sums = reinterpret_cast<float*>(s_.region);  // [segment][2 groups][16 rows][16 tokens]
    const int g = lane() / 4, t = lane() % 4;
#pragma unroll
    for (int j0 = 0; j0 < kDraftGroups; j0 += 2) {
      if (j0 >= count) break;
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int b = 0; b < 2; ++b)
#pragma unroll
          for (int r = 0; r < 2; ++r)
            *reinterpret_cast<float2*>(sums + ((segment() * 2 + j) * 16 + g + 8 * r) * 16 + 8 * b + 2 * t) = {
                acc[j0 + j][b][2 * r], acc[j0 + j][b][2 * r + 1]};
      sync_block();
      store(job, pass, group + j0, min(2, count - j0), sums);
      sync_block();
    }
  }

  __device__ float total(const float* sums, int j, int row, int token) const {
    float s[kSegments];
#pragma unroll
    for (int r = 0; r < kSegments; ++r) s[r] = sums[((r * 2 + j) * 16 + row) * 16 + token];
    return tree8(s);
  }

  __device__ void store(const DraftJob& job, int pass, int group, int count, const float* sums) {
    const int row = threadIdx.x % 16, token = threadIdx.x / 16, i = pass * static_cast<int>(kDraftTokens) + token;
    if (i >= job.tokens) return;
    if (job.output == DraftOutput::kSwiglu) {
      const int column = group / 2 * 16 + row;
      const uint16_t m = draft_swiglu(to_bf16(total(sums, 0, row, token)), to_bf16(total(sums, 1, row, token)));
      at<uint16_t>(s_.offsets.operand[1])[draft_operand_at(i, column, static_cast<int>(p_.inner)) + column % 4] = m;
      return;
    }
    for (int j = 0; j < count; ++j) {
      const DraftGroup where = draft_group(s_, job, group + j);
      const DraftMatrix& m = s_.matrix[where.matrix];
      const int column = where.group * 16 + row;
      if (column >= m.rows) continue;
      const float value = total(sums, j, row, token);
      if (job.output == DraftOutput::kHead && where.matrix == job.first)
        static_cast<float*>(m.out)[int64_t{i} * m.stride + column] = value;
      else
        static_cast<uint16_t*>(m.out)[int64_t{i} * m.stride + column] = to_bf16(value);
    }
  }

  DraftCursor cursor_;
  int slot_, count_ = 0, length_ = 0;
  const uint16_t* weights_[kDraftGroups][2];
};

}  // namespace muse
