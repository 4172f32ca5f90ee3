// The GEMMs of a draft: row-major weights, read once per 16 tokens. A block takes a run of 16-row groups, a warp one of
// the contract's K segments of each, four groups at a time. Where it has fewer, a step goes on in k, so that as many
// bytes are under way. Its weights come by asynchronous copies through a ring of its own: no warp waits for another.
// The order of weights is known from the start, so that a ring runs ahead across GEMMs and barriers, 25 MB in all.
#pragma once

#include "ffi/device/ptx.cuh"
#include "ffi/draft/cuda/shared.cuh"

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
    to[draft_operand_at(i, column / 2 * 2, inner) + column % 2] = draft_swiglu(to_bf16(total(0)), to_bf16(total(1)));
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
    policy_ = ptx::evict_first_policy();
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

  // The batch at the cursor.
  __device__ __forceinline__ void aim() {
    const DraftCursor& c = cursor();
    count_ = c.count, inner_ = c.inner, length_ = c.inner / kSegments;
#pragma unroll
    for (int j = 0; j < kDraftGroups; ++j) rows_[j] = c.rows[j], weights_[j] = c.w[j] + segment() * length_;
  }

  // One slot of weights, in a copy group of its own, empty at the end of all jobs. A slot holds four pieces, tiles of
  // 16 rows and 64 k: a step of each of four groups, or the next two of each of two, or four of one. Eight lanes take
  // the 128 bytes of a row.
  __device__ __forceinline__ void fetch() {
    if (count_ > 0) {
      const uint32_t to = slot_address(fetched_);
      const int part = lane() % 8;
#pragma unroll
      for (int j = 0; j < kDraftGroups; ++j) {
        const int k = (step_ + (count_ == 1 ? j : count_ == 2 ? j / 2 : 0)) * kDraftStep + part * 8;
        const bool inside = k < length_;
        const uint16_t* from = weights_[j] + (inside ? k : 0);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = 4 * i + lane() / 8;
          ptx::copy16_l2_256(to + j * kDraftPieceBytes + tile_offset(row, part),
                             from + min(row, rows_[j]) * inner_,  // what does not exist is not stored
                             inside, policy_);
        }
      }
      step_ += draft_steps(count_);
      if (step_ * kDraftStep >= length_) {
        next_draft_batch();
        step_ = 0;
        aim();
      }
    }
    ptx::commit_copies();
    if (++fetched_ == kDraftSlots) fetched_ = 0;
  }

  __device__ uint32_t slot_address(int slot) const {
    return ptx::shared_address(s_.ring) + (segment() * kDraftSlots + slot) * kDraftSlotBytes;
  }

  // For the next call; the block's next phase begins with a barrier.
  __device__ void leave() {
    __syncwarp();  // a block without a part of the job comes here at once: all have read the cursor
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
    const bool both = job.tokens - pass * static_cast<int>(kDraftTokens) > 8;  // tiles of eight tokens
    const uint2* x = at<uint2>(s_.offsets.operand[job.operand]) +
                     (int64_t{2 * pass} * (job.inner / 16) + segment() * blocks) * 32 + lane();
    const int tile = job.inner / 16 * 32;
    uint2 tokens[kAtOnce][2], next[kAtOnce][2] = {};
    const auto load = [&](int block) {
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) {
        const uint2* from = x + min(block + e, blocks - 1) * 32;
        next[e][0] = __ldcg(from);
        if (both) next[e][1] = __ldcg(from + tile);
      }
    };
    load(0);
#pragma unroll 1
    for (int block = 0; block < blocks; block += kBlocks) {
      // Lanes 8 i to 8 i + 7 give the rows of matrix i: rows 0 to 7 and 8 to 15 of eight k, then of the next eight.
      const uint32_t from = slot_address(slot_) + tile_offset(lane() % 16, lane() / 16);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        if (b % kAtOnce == 0) {
#pragma unroll
          for (int e = 0; e < kAtOnce; ++e) tokens[e][0] = next[e][0], tokens[e][1] = next[e][1];
          load(block + b + kAtOnce);  // ahead, because they come from L2
        }
        if (b == 0) {
          ptx::wait_copies<kDraftSlots - 1>();
          __syncwarp();  // of all lanes
        }
        if (block + b >= blocks) break;
        uint32_t a[kGroups][4];
#pragma unroll
        for (int j = 0; j < kGroups; ++j)
          ptx::ldmatrix_x4(a[j], (from + (b / 4 * kGroups + j) * kDraftPieceBytes) ^ (b % 4 * 32));
        const uint2* t = tokens[b % kAtOnce];
        const uint32_t low[2] = {t[0].x, t[0].y}, high[2] = {t[1].x, t[1].y};
#pragma unroll
        for (int j = 0; j < kGroups; ++j) ptx::mma_bf16(acc[j][0], a[j], low);
        if (!both) continue;
#pragma unroll
        for (int j = 0; j < kGroups; ++j) ptx::mma_bf16(acc[j][1], a[j], high);
      }
      if (++slot_ == kDraftSlots) slot_ = 0;
      __syncwarp();  // the slot has been read
      fetch();
    }
    finish<kGroups>(pass, group, acc);
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
  int count_, inner_, length_, rows_[kDraftGroups];
  const uint16_t* weights_[kDraftGroups];
};

}  // namespace muse
