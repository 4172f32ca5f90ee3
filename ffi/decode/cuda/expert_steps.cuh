// Experts of a layer, N-sharded over the ranks.
#pragma once

#include "ffi/decode/cuda/expert_finish.cuh"

namespace muse {

class ExpertSteps : public ExpertFinish {
 public:
  using ExpertFinish::ExpertFinish;

  // Pairs by expert, and slices, in shared memory: by every block for itself, all with the same result, because blocks
  // share out the slices. A thread counts who comes before its pair. False: somebody gave up.
  __device__ bool group_pairs() {
    const int pairs = rows() * top_k();
    int32_t* key = region<int32_t>();                       // expert, then pair; filled up to whole quads
    uint32_t* starts = region<uint32_t>() + kMaxPairs + 4;  // a bit per pair in its new place: a slice starts there
    if (const int w = thread_index(); w < kMaxPairs / 32) starts[w] = 0;
#pragma unroll 1
    for (int j = thread_index(); j < pairs + 4; j += kThreads) {
      uint32_t expert[1] = {};
      if (j < pairs)
        wait(
            Phase::kExperts, [&](int) { return mine<uint64_t>(w_.router_experts) + j; }, [&](int) { return me(); },
            expert, kBarrierGrace);
      key[j] = j < pairs ? static_cast<int>(expert[0]) << kMaxPairsLog2 | j : INT32_MAX;
    }
    if (!all_alive()) return false;
    // Two neighbours count for a pair, every other quad each; a warp stays together.
#pragma unroll 1
    for (int at = thread_index(); (at & ~31) < 2 * pairs; at += kThreads) {
      const int j = min(at / 2, pairs - 1);
      const int own = key[j], first = own & ~static_cast<int>(kMaxPairs - 1);  // the expert's
      int before = 0, others = 0;                                              // of these, other experts'
#pragma unroll 2
      for (int o = at % 2 * 4; o < pairs; o += 8) {
        const int4 four = *reinterpret_cast<const int4*>(key + o);
        before += ((four.x < own) + (four.y < own)) + ((four.z < own) + (four.w < own));
        others += ((four.x < first) + (four.y < first)) + ((four.z < first) + (four.w < first));
      }
      before += __shfl_xor_sync(~0u, before, 1);
      others += __shfl_xor_sync(~0u, others, 1);
      if (at >= 2 * pairs || at % 2) continue;
      s_.pairs[before] = static_cast<uint16_t>(j);
      if ((before - others) % kSliceRows == 0) atomicOr(&starts[before / 32], 1u << before % 32);
    }
    sync_block();
#pragma unroll 1
    for (int at = thread_index(); at < pairs; at += kThreads) {
      int slice = 0;
#pragma unroll 1
      for (int w = 0; w < at / 32; ++w) slice += __popc(starts[w]);
      const uint32_t word = starts[at / 32];
      slice += __popc(word & ((1u << at % 32) - 1));
      if (word >> at % 32 & 1u) {
        s_.expert[slice] = static_cast<int16_t>(key[s_.pairs[at]] >> kMaxPairsLog2);
        s_.first[slice++] = static_cast<int16_t>(at);
      }
      if (at == pairs - 1) s_.slices = slice, s_.first[slice] = static_cast<int16_t>(pairs);
    }
    sync_block();
    if (const int i = thread_index(); i < 2)
      s_.expert_units[i] =
          part(s_.slices * s_.jobs.experts[p_.kind[layer()].nvfp4][i].groups, place_.index, place_.size);
    sync_block();
    return true;
  }

  // The calling warp's segment of a pair's row, the first GEMM's operand, and of its hidden row, the second's: what the
  // rank of the warp's number sent. A lane's words begin at 2 t.
  __device__ const uint64_t* token_row(int pair) const {
    const int warp = thread_index() / 32;
    return mine<uint64_t>(w_.x) + (pair / top_k() * kSegments + warp) * segment_words();
  }
  __device__ const uint64_t* hidden_row(int pair) const {
    const int warp = thread_index() / 32;
    return slots_from(warp, w_.hidden, hidden_words(kMaxRows * top_k())) + hidden_words(pair);
  }

  // The pair of a slice whose operand column is the lane's; columns past the last repeat the first.
  __device__ int lane_pair(int slice) const {
    const int begin = s_.first[slice], column = begin + thread_index() % 32 / 4;
    return s_.pairs[column < s_.first[slice + 1] ? column : begin];
  }

  // Until what each lane will load of the operands of the block's units is there.
  __device__ void wait_tokens() {
    const Range units = own_units();
    if (units.begin == units.end) return;
    const Divisor& by_groups = this_job().by_groups;
#pragma unroll 1
    for (int slice = by_groups.quotient(units.begin); slice <= by_groups.quotient(units.end - 1); ++slice)
      wait_pieces((s_.second ? hidden_row(lane_pair(slice)) : token_row(lane_pair(slice))) + thread_index() % 4 * 2);
  }

  // This block's units of one expert GEMM: warp w makes segment w's chains of them all. What depends on the thread is
  // worked out where it is needed: there are no registers to keep it.
  template <ExpertKind kKind>
  __device__ void expert_chains() {
    const ExpertJob& job = this_job();
    const Range units = own_units();
    const int chunks = job.chunks, count = job.k_blocks;
    // 16-blocks of a chunk, and as many as are loaded at once.
    constexpr int kChunkBlocks = kKind == ExpertKind::kBf16 ? kSlotTiles : kSpanBlocks;
    constexpr int kHeld = kKind == ExpertKind::kW4A4 ? kSpanBlocks : kSlotTiles;
    uint32_t chunk = place_.chunk + thread_index() / 32, number = place_.unit;
    int there = 0;  // the warp's chunks in the ring
    TokenOperand<kHeld> x;
    int loaded = -1;  // the slice in x, where it holds a whole segment
#pragma unroll 1
    for (int unit = units.begin; unit < units.end; ++unit, ++number) {
      const int slice = job.by_groups.quotient(unit), pair = lane_pair(slice);
      float acc[4] = {}, other[4] = {};  // of the unit's row groups in turn
#pragma unroll 1
      for (int c = 0; c < chunks; ++c) {
        const int lane = thread_index() % 32;
        const auto load = [&](int block) {
          if constexpr (kKind == ExpertKind::kW4A4)
            wait_codes((s_.second ? hidden_row(pair) : token_row(pair)) + block / 2 * kPieceWords, count - block, x);
          else if (s_.second)  // one call for both would cost more registers than there are
            load_tokens(hidden_row(pair), block, count, lane % 4, x);
          else
            load_tokens(token_row(pair), block, count, lane % 4, x);
        };
        const int bytes = job.bytes(c);
        if (kKind == ExpertKind::kW4A4 && (slice != loaded || chunks > 1)) load(c * kChunkBlocks), loaded = slice;
#pragma unroll 1  // one copy of the chain: the instruction cache is small
        for (int half = 0; half < job.unit_groups; ++half, chunk += kSegments) {
          if constexpr (kKind == ExpertKind::kW4A4) {
            if (there == 0)
              there =
                  ring_.wait_run(chunk, kSegments, ((units.end - unit) * chunks - c) * job.unit_groups - half, lane);
            --there;
            chain_codes(ring_.slot(chunk), bytes / static_cast<int>(kPanelBytes), lane, x,
                        region<ChunkScales>(kUnits * kUnitSumBytes)[thread_index() / 32], acc);
          } else if constexpr (kKind == ExpertKind::kW4A16) {
            const unsigned char* panels = ring_.wait(chunk);
#pragma unroll 1
            for (int p = 0; p < bytes / static_cast<int>(kPanelBytes); ++p) {
              load(c * kChunkBlocks + p * kHeld);
              chain_panel(panels + p * kPanelBytes, lane, x, acc);
            }
          } else {
            load(c * kChunkBlocks);
            chain_expert_tiles(ring_.wait(chunk), bytes / static_cast<int>(kTile * 2), lane, x, acc);
          }
          ring_.release(chunk, lane);
          if (job.unit_groups == 2) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const float own = acc[e];
              acc[e] = other[e];
              other[e] = own;
            }
          }
        }
      }
      units_.wait_place(number);
      const int lane = thread_index() % 32;
      float* out = unit_sums(number, thread_index() / 32, 0);
      const int low = sum_at(lane / 4, lane % 4 * 2), high = sum_at(lane / 4 + 8, lane % 4 * 2);
      *reinterpret_cast<float2*>(out + low) = float2{acc[0], acc[1]};
      *reinterpret_cast<float2*>(out + high) = float2{acc[2], acc[3]};
      if (job.unit_groups == 2) {
        *reinterpret_cast<float2*>(out + 16 * kSliceRows + low) = float2{other[0], other[1]};
        *reinterpret_cast<float2*>(out + 16 * kSliceRows + high) = float2{other[2], other[3]};
      }
      units_.bring(number);
    }
  }

  // Behind all chains of one expert GEMM: until its units are finished.
  __device__ void end_experts() {
    units_.wait_end(s_.second);
    sync_block();
    if (thread_index() > 0) return;
    ring_.set_streaming(false);
    const ExpertJob& job = this_job();
    const Range units = own_units();
    place_.chunk += (units.end - units.begin) * kSegments * job.unit_groups * job.chunks;
    place_.unit += units.end - units.begin;
    s_.second = !s_.second;
  }

 private:
  // load_codes by a warp, as soon as all are there.
  __device__ __forceinline__ void wait_codes(const uint64_t* row, int count, TokenOperand<kSpanBlocks>& x) {
    const int t = thread_index() % 4;
    const bool second = s_.second;
    const uint32_t epoch = place_.epoch;
    // First one word of each quarter: all would be much to look at again and again.
    const uint64_t* sample = row + (min((t + 1) * kSpanBlocks / 4, count) - 1) / 2 * kPieceWords + 2 * t;
    uint32_t spins = 0;
#pragma unroll 1
    while (true) {
#pragma unroll 1
      do {  // x is not kept through this
        if (++spins % 64 == 0 && should_leave(place_, second ? Phase::kHidden : Phase::kExperts,
                                              second ? thread_index() / 32 : me(), second ? 0 : kBarrierGrace))
          place_.gave_up = 1;
      } while (__any_sync(~0u, is_stale(ptx::load_relaxed_sys(sample), epoch) && !place_.gave_up));
      const bool there =
          count >= kSpanBlocks ? load_codes<true>(row, count, t, epoch, x) : load_codes<false>(row, count, t, epoch, x);
      if (__all_sync(~0u, there) || __any_sync(~0u, place_.gave_up)) return;
    }
  }

  // The words of a lane's pieces, from `from` on.
  __device__ void wait_pieces(const uint64_t* from) {
    const int t = thread_index() % 4, blocks_of_16 = this_job().k_blocks;
    const bool second = s_.second;
    const int words = 2 * blocks_of_16;
    const uint32_t epoch = place_.epoch;
    constexpr int kPieces = 16;  // loads in flight
#pragma unroll 1
    for (int first = 0; first < words; first += 2 * kPieces, from += kPieces * kPieceWords) {
      const int count = words - first;
      bool again = false;
      const auto look = [&] {
        if (again) {  // one of each quarter: all would be much to look at again and again
          const int piece = min((t + 1) * (kPieces / 4), (count + 1) / 2) - 1;
          if (is_stale(ptx::load_relaxed_sys(from + piece * kPieceWords), epoch)) return 0;
        }
        again = true;
        uint64_t word[kPieces][2];
#pragma unroll
        for (int p = 0; p < kPieces; ++p)  // what lies behind the last is read and not used
          ptx::load_relaxed_sys_v2(from + p * kPieceWords, word[p]);
        bool missing = false;
#pragma unroll
        for (int i = 0; i < 2 * kPieces; ++i) missing = missing || (i < count && is_stale(word[i / 2][i % 2], epoch));
        return missing ? 0 : -1;
      };
      wait_until(place_, second ? Phase::kHidden : Phase::kExperts, second ? 0 : kBarrierGrace, look,
                 [&](int) { return second ? thread_index() / 32 : me(); });
    }
  }
};

}  // namespace muse
