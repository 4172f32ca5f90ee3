// Experts of a layer, N-sharded over the ranks.
#pragma once

#include "ffi/decode/cuda/expert_finish.cuh"

namespace muse {

class ExpertSteps : public ExpertFinish {
 public:
  using ExpertFinish::ExpertFinish;

  // Pairs by expert, and slices, in shared memory: by every block for itself, all with the same result, because blocks
  // share out the slices. A thread counts who comes before its pair.
  __device__ void group_pairs() {
    const int pairs = rows() * top_k();
    int32_t* key = region<int32_t>();                       // expert, then pair; filled up to whole quads
    uint32_t* starts = region<uint32_t>() + kMaxPairs + 4;  // a bit per pair in its new place: a slice starts there
    if (const int w = thread_index(); w < kMaxPairs / 32) starts[w] = 0;
#pragma unroll 1
    for (int j = thread_index(); j < pairs + 4; j += kThreads)
      key[j] = j < pairs ? __ldcg(mine<int32_t>(w_.router_experts) + j) << kMaxPairsLog2 | j : INT32_MAX;
    sync_block();
#pragma unroll 1
    for (int j = thread_index(); j < pairs; j += kThreads) {
      const int own = key[j], first = own & ~static_cast<int>(kMaxPairs - 1);  // the expert's
      int before = 0, others = 0;                                              // of these, other experts'
#pragma unroll 2
      for (int o = 0; o < pairs; o += 4) {
        const int4 four = *reinterpret_cast<const int4*>(key + o);
        before += (four.x < own) + (four.y < own) + (four.z < own) + (four.w < own);
        others += (four.x < first) + (four.y < first) + (four.z < first) + (four.w < first);
      }
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
  }

  // The operand row of a pair: GEMM 1 reads rows, GEMM 2 pairs.
  __device__ const uint16_t* token_row(int pair) const {
    return s_.second ? mine<uint16_t>(w_.hidden_rows) + pair * expert_row(static_cast<int>(p_.moe_inner))
                     : mine<uint16_t>(w_.x) + pair / top_k() * expert_row(moe_hidden());
  }

  // This block's units of one expert GEMM: warp w makes segment w's chains of them all.
  template <ExpertKind kKind>
  __device__ void expert_chains() {
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    const ExpertJob& job = this_job();
    const Range units = own_units();
    const int chunks = job.chunks();
    const int segment_row = expert_row(static_cast<int>(s_.second ? p_.moe_inner : p_.moe_hidden)) / kSegments;
    // 16-blocks of a chunk, and as many as are loaded at once.
    constexpr int kChunkBlocks = kKind == ExpertKind::kBf16 ? kSlotTiles : kSpanBlocks;
    constexpr int kHeld = kKind == ExpertKind::kW4A4 ? kSpanBlocks : kSlotTiles;
    uint32_t chunk = place_.chunk + warp, number = place_.unit;
    TokenOperand<kHeld> x;
    int loaded = -1;  // the slice in x, where it holds a whole segment
#pragma unroll 1
    for (int unit = units.begin; unit < units.end; ++unit, ++number) {
      const int slice = job.by_groups.quotient(unit), begin = s_.first[slice];
      const int column = begin + lane / 4 < s_.first[slice + 1] ? begin + lane / 4 : begin;
      const uint16_t* tokens = token_row(s_.pairs[column]) + warp * segment_row;
      float acc[4] = {}, other[4] = {};  // of the unit's row groups in turn
#pragma unroll 1
      for (int c = 0; c < chunks; ++c) {
        const auto load = [&](int block) {
          load_tokens<kHeld>(tokens + block * 16, job.k_blocks - block, lane % 4, x);
        };
        const int bytes = job.bytes(c);
        if (kKind == ExpertKind::kW4A4 && (slice != loaded || chunks > 1)) load(c * kChunkBlocks), loaded = slice;
#pragma unroll 1  // one copy of the chain: the instruction cache is small
        for (int half = 0; half < job.unit_groups; ++half, chunk += kSegments) {
          if constexpr (kKind == ExpertKind::kW4A4) {
            chain_codes(ring_.wait(chunk), bytes / static_cast<int>(kPanelBytes), lane, x, acc);
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
      float* out = unit_sums(number, warp, 0);
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
    const ExpertJob& job = this_job();
    const Range units = own_units();
    place_.chunk += (units.end - units.begin) * kSegments * job.unit_groups * job.chunks();
    place_.unit += units.end - units.begin;
    s_.second = !s_.second;
  }

  // All ranks' blocks of the hidden rows -> operand rows of this rank.
  __device__ bool gather_hidden() {
    const int l = layer();
    const int inner = static_cast<int>(p_.moe_inner), blocks_of_16 = inner / 16, groups = blocks_of_16 / kRanks;
    const int per_source = kMaxRows * top_k() * groups * kBlockWords;
    const bool quantized = p_.kind[l].nvfp4 && p_.quantize_activations;
#pragma unroll 1
    for (int at = (thread_index() / 32 * blocks() + block()) * 32 + thread_index() % 32;
         at < rows() * top_k() * blocks_of_16; at += blocks() * kThreads) {
      const int pair = at / blocks_of_16, b = at - pair * blocks_of_16, source = b / groups;
      const uint64_t* slot =
          slots_from(source, w_.hidden, per_source) + (pair * groups + b - source * groups) * kBlockWords;
      uint16_t* out = operand_block(mine<uint16_t>(w_.hidden_rows) + pair * expert_row(inner), inner, b);
      uint32_t word[8] = {};
      if (quantized) {
        uint32_t three[3] = {};
        wait(Phase::kHidden, [&](int e) { return slot + e; }, [&](int) { return source; }, three);
        const __half2 scale = __half2half2(__float2half_rn(from_e4m3(static_cast<uint8_t>(three[2]))));
#pragma unroll
        for (int k = 0; k < 8; ++k) word[k] = code_pair(three[k / 4] >> (8 * (k % 4)) & 0xFFu, scale);
      } else {
        wait(Phase::kHidden, [&](int e) { return slot + e; }, [&](int) { return source; }, word);
      }
#pragma unroll
      for (int t = 0; t < 4; ++t) *reinterpret_cast<uint2*>(out + t * 8) = uint2{word[t], word[t + 4]};
    }
    return all_alive();
  }
};

}  // namespace muse
