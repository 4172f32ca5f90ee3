// The GEMMs of a draft: row-major weights, read once per 16 tokens. A block takes a run of 16-row groups, a warp one of
// the contract's K segments of each, four groups at a time. Where it has fewer, a slot goes on in k, so that as many
// bytes are under way. Its weights come by asynchronous copies through a ring of its own: no warp waits for another.
// The order of weights is known from the start, so that a ring runs ahead across GEMMs and waits, 17 MB in all. More
// would not be faster: what comes into L2 too early is gone again when it is wanted.
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

// Groups of the next batch, of `left`. Three are multiplied as four, of which one does not exist; a batch of one takes
// as long as its token operand takes to come, which five groups had better avoid.
__device__ __forceinline__ int draft_batch(const DraftJob& job, int left) {
  const bool threes = left == 5 || left == 6;
  return threes && job.output != DraftOutput::kSwiglu ? 3 : min(left, kDraftGroups);
}

// Steps of k that a ring slot holds of each of a batch's groups.
__device__ __forceinline__ int draft_steps(int count) { return count > 2 ? 1 : 6 - 2 * count; }

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
    found = groups.begin < groups.end && s.table[job].tokens > 0;  // this block has a part of it
  }
  int count = 0;
  DraftGroup at{};
  if (found) {
    count = draft_batch(s.table[job], draft_groups(s.table[job]).end - group);
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

// Adds the segments' sums of a batch's groups, [segment][group][16 rows][16 tokens], and stores: two neighbouring rows'
// results are a word.
__device__ __noinline__ void store_draft_groups(int pass, int group, int count) {
  const DraftShared& s = draft_shared();
  const DraftJob& job = s.table[s.job];
  const auto* sums = reinterpret_cast<const float*>(draft_shared().region);
  const int row = threadIdx.x % 16, token = threadIdx.x / 16, i = pass * static_cast<int>(kDraftTokens) + token;
  const bool there = i < job.tokens;
  const auto total = [&](int j) {
    float segment[kSegments];
#pragma unroll
    for (int r = 0; r < kSegments; ++r) segment[r] = sums[((r * kDraftGroups + j) * 16 + row) * 16 + token];
    return tree8(segment);
  };
  const auto with_next = [](uint16_t own) {
    return two_bf16(own, __shfl_down_sync(~0u, static_cast<uint32_t>(own), 1));
  };
  if (job.output == DraftOutput::kSwiglu) {
    auto* to = static_cast<uint16_t*>(s.matrix[job.first].out);
#pragma unroll 1
    for (int j = 0; j < count; j += 2) {
      const uint32_t two = with_next(draft_swiglu(to_bf16(total(j)), to_bf16(total(j + 1))));
      if (there && row % 2 == 0)
        store_word(to + draft_operand_at(i, (group + j) / 2 * 16 + row, static_cast<int>(s.call.plan.inner)), two);
    }
    return;
  }
#pragma unroll 1
  for (int j = 0; j < count; ++j) {
    const DraftGroup where = draft_group(s, job, group + j);
    const DraftMatrix& m = s.matrix[where.matrix];
    const int column = where.group * 16 + row;
    const int64_t to = int64_t{i} * m.stride + column;
    const float sum = total(j);
    if (job.output == DraftOutput::kBf16) {
      const uint32_t two = with_next(to_bf16(sum));
      if (there && row % 2 == 0 && column < m.rows) store_word(static_cast<uint16_t*>(m.out) + to, two);
    } else if (there && column < m.rows) {  // read behind barriers
      if (where.matrix == job.first)
        static_cast<float*>(m.out)[to] = sum;
      else
        static_cast<uint16_t*>(m.out)[to] = to_bf16(sum);
    }
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
        const int count = draft_batch(job, groups.end - group);
        if (count == 1)
          group = multiply<1>(job, pass, group, groups);
        else if (count == 2)
          group = multiply<2>(job, pass, group, groups);
        else
          group = multiply<kDraftGroups>(job, pass, group, groups);
      }
    leave();
    if (threadIdx.x == 0) ++s_.job;
  }

 private:
  __device__ int segment() const { return static_cast<int>(threadIdx.x / 32); }
  __device__ DraftCursor& cursor() const { return s_.fetch[threadIdx.x / 32]; }

  // Fetching. ----------------------------------------------------------------------------------------------------

  // The batch at the cursor.
  __device__ __forceinline__ void aim() {
    const DraftCursor& c = cursor();
    count_ = c.count, inner_ = c.inner, length_ = c.inner / kSegments;
  }

  // One slot of weights, in a copy group of its own, empty at the end of all jobs. A slot holds four pieces, tiles of
  // 16 rows and 64 k: the next two steps of two groups, of four groups in turn of the first two and the others, or four
  // of one. Eight lanes take 128 bytes of a row, and the row's next 128 follow at once: memory gives 256 together.
  __device__ __forceinline__ void fetch() {
    if (count_ > 0) {
      const uint32_t to = slot_address(fetched_);
      const int part = lane() % 8;
      const DraftCursor& batch = cursor();  // not in registers, of which products need all
#pragma unroll 1
      for (int j = 0; j < kDraftGroups; ++j) {
        // Of four groups step_ counts slots, two of which take the same k.
        const int which = count_ > 2 ? step_ % 2 * 2 + j % 2 : j;
        const int k = (count_ == 1 ? step_ + j : step_ / 2 * 2 + j / 2) * kDraftStep + part * 8;
        const bool inside = k < length_ && (which < 3 || count_ != 3);
        const uint16_t* from = batch.w[which] + segment() * length_ + (inside ? k : 0);
        const int rows = batch.rows[which];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = 4 * i + lane() / 8;
          ptx::copy16_l2_256(to + j * kDraftPieceBytes + tile_offset(row, part),
                             from + min(row, rows) * inner_,  // what does not exist is not stored
                             inside, policy_);
        }
      }
      step_ += draft_steps(count_);
      if (step_ * kDraftStep >= length_ && (count_ <= 2 || step_ % 2 == 0)) {
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

  // Batches from `group` on, as long as they are of so many groups; where they end. Blocks behind a segment's last are
  // zeros on both sides, and so is a second tile of tokens that does not exist: they change no bit of a sum, and code
  // without branches is scheduled better.
  template <int kGroups>
  __device__ int multiply(const DraftJob& job, int pass, int group, Range groups) {
    // Groups of a slot; blocks of a slot, or of the two that four groups take; rounds of blocks.
    constexpr int kInSlot = kGroups == 1 ? 1 : 2, kBlocks = kDraftGroups / kInSlot * kDraftStep / 16;
    constexpr int kAtOnce = 4, kRounds = kBlocks / kAtOnce;
    constexpr bool kTwice = kGroups > kInSlot;  // two slots need the same tokens
    const int length = job.inner / kSegments, blocks = length / 16;
    const int tokens_left = job.tokens - pass * static_cast<int>(kDraftTokens);
    const bool both = tokens_left > 8;  // tiles of eight tokens
    const uint32_t* x =
        at<uint32_t>(job.operand) + ((int64_t{2 * pass} * (job.inner / 16) + segment() * blocks) * 32 + lane()) * 2;
    const int tile = job.inner / 16 * 64;
    // The token operand, a slot ahead: it comes from L2, where it queues behind weights.
    uint2 ahead[kRounds][kAtOnce][2];
    const auto load = [&](int block, uint2(&to)[kAtOnce][2]) {
      const uint32_t *low = x + block * 64, *high = low + tile;
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) {
        to[e][0] = block + e < blocks ? ptx::load_relaxed_gpu_v2(low + e * 64) : uint2{0, 0};
        to[e][1] = block + e < blocks && both ? ptx::load_relaxed_gpu_v2(high + e * 64) : uint2{0, 0};
      }
    };
    bool first = group == groups.begin;  // the operand may still have to come
    // Of a token that does not exist nothing comes. The segment's last block tells that the others are about to be
    // there: they need hardly ever be looked at twice.
    const bool there[2] = {lane() / 4 < tokens_left, lane() / 4 + 8 < tokens_left};
    if (first && there[0]) wait_word(x + (blocks - 1) * 64);
    if (first && there[1]) wait_word(x + tile + (blocks - 1) * 64);
    __syncwarp();
    const auto wait = [&](int block) {
      const auto look = [&] {
        bool missing = false;
#pragma unroll
        for (int n = 0; n < kRounds * kAtOnce * 2; ++n) {
          const uint2& two = ahead[n / 2 / kAtOnce][n / 2 % kAtOnce][n % 2];
          missing = missing || (there[n % 2] && !(is_set(two.x) && is_set(two.y)));
        }
        if (!missing) return -1;
#pragma unroll
        for (int n = 0; n < kRounds; ++n) load(block + n * kAtOnce, ahead[n]);
        return 0;
      };
      wait_until_there(look);
      __syncwarp();
    };
#pragma unroll
    for (int n = 0; n < kRounds; ++n) load(n * kAtOnce, ahead[n]);
    int count = draft_batch(job, groups.end - group);
#pragma unroll 1
    do {
      Accumulators<kGroups> acc = {};
#pragma unroll 1
      for (int block = 0; block < blocks; block += kBlocks) {
        // Behind the last slot the next batch's, where there may be one.
        const int next = kGroups < kDraftGroups || block + kBlocks < blocks ? block + kBlocks : 0;
        if (first) wait(block);
        uint2 tokens[kRounds][kAtOnce][2];
#pragma unroll
        for (int n = 0; n < kRounds; ++n) {
#pragma unroll
          for (int e = 0; e < kAtOnce; ++e) tokens[n][e][0] = ahead[n][e][0], tokens[n][e][1] = ahead[n][e][1];
          if (kTwice) load(next + n * kAtOnce, ahead[n]);
        }
#pragma unroll
        for (int begin = 0; begin < kGroups; begin += kInSlot) {
          ptx::wait_copies<kDraftSlots - 1>();
          __syncwarp();  // of all lanes
          // Lanes 8 i to 8 i + 7 give the rows of matrix i: rows 0 to 7 and 8 to 15 of eight k, then of the next eight.
          const uint32_t from = slot_address(slot_) + tile_offset(lane() % 16, lane() / 16);
#pragma unroll
          for (int b = 0; b < kBlocks; ++b) {
            uint32_t a[kInSlot][4];
#pragma unroll
            for (int j = 0; j < kInSlot; ++j)
              ptx::ldmatrix_x4(a[j], (from + (b / 4 * kInSlot + j) * kDraftPieceBytes) ^ (b % 4 * 32));
#pragma unroll
            for (int t = 0; t < 2; ++t) {
              const uint2& x = tokens[b / kAtOnce][b % kAtOnce][t];
              const uint32_t two[2] = {x.x, x.y};
#pragma unroll
              for (int j = 0; j < kInSlot; ++j) ptx::mma_bf16(acc[begin + j][t], a[j], two);
            }
            // As soon as a round's are used, in their place.
            if (!kTwice && b % kAtOnce == kAtOnce - 1) load(next + b / kAtOnce * kAtOnce, ahead[b / kAtOnce]);
          }
          if (++slot_ == kDraftSlots) slot_ = 0;
          __syncwarp();  // the slot has been read
          fetch();
        }
      }
      finish<kGroups>(pass, group, count, acc);
      group += count, first = false;
      count = draft_batch(job, groups.end - group);
    } while (kGroups == kDraftGroups && count > 2);
    return group;
  }

  // A batch's sums into the region, for those who add and store.
  template <int kGroups>
  __device__ void finish(int pass, int group, int count, const Accumulators<kGroups>& acc) {
    auto* sums = reinterpret_cast<float*>(s_.region);
    const int g = lane() / 4, t = lane() % 4;
#pragma unroll
    for (int j = 0; j < kGroups; ++j)
#pragma unroll
      for (int b = 0; b < 2; ++b)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          *reinterpret_cast<float2*>(sums + ((segment() * kDraftGroups + j) * 16 + g + 8 * r) * 16 + 8 * b + 2 * t) = {
              acc[j][b][2 * r], acc[j][b][2 * r + 1]};
    sync_block();
    store_draft_groups(pass, group, count);
    sync_block();
  }

  uint64_t policy_;
  int slot_, fetched_, step_;  // the next to be read, the next to be filled, and with what
  int count_, inner_, length_;
};

}  // namespace muse
