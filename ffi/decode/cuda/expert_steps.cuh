// Experts of a layer, N-sharded over the ranks.
#pragma once

#include "ffi/decode/cuda/expert_chain.cuh"
#include "ffi/decode/cuda/router_steps.cuh"

namespace muse {

constexpr int kSliceRows = 8;  // (row, slot) pairs of one pass through an expert's weights

class ExpertSteps : public RouterSteps {
 public:
  using RouterSteps::RouterSteps;

  // Pairs by expert, and slices, in shared memory: by every block for itself, all with the same result, because blocks
  // share out the slices.
  __device__ void group_pairs() {
    const int pairs = rows() * top_k(), experts = static_cast<int>(p_.experts);
    int *count = region<int>(), *first = count + experts;
    int16_t *chosen = reinterpret_cast<int16_t*>(first + experts), *place = chosen + pairs;
#pragma unroll 1
    for (int e = thread_index(); e < experts; e += kThreads) count[e] = 0;
#pragma unroll 1
    for (int j = thread_index(); j < pairs; j += kThreads)
      chosen[j] = static_cast<int16_t>(__ldcg(mine<int32_t>(w_.router_experts) + j));
    sync_block();
    if (thread_index() < 32) {
      const int lane = thread_index(), each = (experts + 31) / 32, begin = min(lane * each, experts),
                end = min(begin + each, experts);
      // A pair's place among its expert's: how many come before it.
#pragma unroll 1
      for (int j0 = 0; j0 < pairs; j0 += 32) {
        const int j = j0 + lane, e = j < pairs ? chosen[j] : -1;
        const uint32_t same = __match_any_sync(~0u, e), before = same & ((1u << lane) - 1);
        const int base = e >= 0 ? count[e] : 0;
        __syncwarp();
        if (e >= 0) place[j] = static_cast<int16_t>(base + __popc(before));
        if (e >= 0 && before == 0) count[e] = base + __popc(same);
        __syncwarp();
      }
      // Running sums over the experts: each lane has a stretch of them.
      const auto slices_of = [](int c) { return (c + kSliceRows - 1) / kSliceRows; };
      int own = 0, own_slices = 0;
#pragma unroll 1
      for (int e = begin; e < end; ++e) own += count[e], own_slices += slices_of(count[e]);
      int at = own, slice = own_slices;
#pragma unroll 1
      for (int step = 1; step < 32; step *= 2) {
        const int a = __shfl_up_sync(~0u, at, step), b = __shfl_up_sync(~0u, slice, step);
        if (lane >= step) at += a, slice += b;
      }
      if (lane == 31) s_.slices = slice, s_.first[slice] = static_cast<int16_t>(at);
      at -= own;
      slice -= own_slices;
#pragma unroll 1
      for (int e = begin; e < end; ++e) {
        first[e] = at;
#pragma unroll 1
        for (int c = 0; c < count[e]; c += kSliceRows, ++slice) {
          s_.expert[slice] = static_cast<int16_t>(e);
          s_.first[slice] = static_cast<int16_t>(at + c);
        }
        at += count[e];
      }
    }
    sync_block();
#pragma unroll 1
    for (int j = thread_index(); j < pairs; j += kThreads)
      s_.pairs[first[chosen[j]] + place[j]] = static_cast<uint16_t>(j);
    sync_block();
  }

  // The operand row of a pair: GEMM 1 reads rows, GEMM 2 pairs.
  __device__ const uint16_t* token_row(bool second, int pair) const {
    return second ? mine<uint16_t>(w_.hidden_rows) + pair * expert_row(static_cast<int>(p_.moe_inner))
                  : mine<uint16_t>(w_.x) + pair / top_k() * expert_row(moe_hidden());
  }

  // Segment sums of a batch of units: [unit][segment][row group of the unit][row][column], in the region.
  __device__ float* unit_sums(int unit_in_batch, const ExpertJob& job, int segment, int half) const {
    return region<float>() + ((unit_in_batch * kSegments + segment) * job.unit_groups + half) * 16 * kSliceRows;
  }

  __device__ ExpertKind expert_kind(int64_t l) const {
    return !p_.kind[l].nvfp4 ? ExpertKind::kBf16 : p_.quantize_activations ? ExpertKind::kW4A4 : ExpertKind::kW4A16;
  }

  // Batches of this block's units, as many units at once as the region holds sums of.
  __device__ int expert_batches(int64_t l, bool second) const {
    const ExpertJob job = expert_job(p_, weights(), a_.region_bytes, l, second);
    return job.batches(part(s_.slices * job.groups, place_.index, place_.size));
  }

  // The chains of a batch of this block's units of one GEMM: warp w takes segment w of them all. A function for each
  // kind, and adding up another: what they keep in registers is not for each other.
  template <ExpertKind kKind>
  __device__ void expert_chains(int64_t l, bool second, int batch) {
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    const ExpertJob job = expert_job(p_, weights(), a_.region_bytes, l, second);
    const Range units = job.batch(part(s_.slices * job.groups, place_.index, place_.size), batch);
    const int chunks = job.chunks(), in_round = kSegments * job.unit_groups;
    const int segment_row = expert_row(static_cast<int>(second ? p_.moe_inner : p_.moe_hidden)) / kSegments;
    // 16-blocks of a chunk, and as many as are loaded at once.
    constexpr int kChunkBlocks = kKind == ExpertKind::kBf16 ? kSlotTiles : kSpanBlocks;
    constexpr int kHeld = kKind == ExpertKind::kW4A4 ? kSpanBlocks : kSlotTiles;
    uint32_t start = place_.chunk + warp;
    TokenOperand<kHeld> x;
    int loaded = -1;  // the slice in x, where it holds a whole segment
#pragma unroll 1
    for (int unit = units.begin; unit < units.end; ++unit) {
      const int slice = unit / job.groups, begin = s_.first[slice];
      const int column = begin + lane / 4 < s_.first[slice + 1] ? begin + lane / 4 : begin;
      const uint16_t* tokens = token_row(second, s_.pairs[column]) + warp * segment_row;
#pragma unroll 1  // one copy of the chain: the instruction cache is small
      for (int half = 0; half < job.unit_groups; ++half) {
        float acc[4] = {};
#pragma unroll 1
        for (int c = 0; c < chunks; ++c) {
          const auto load = [&](int block) {
            load_tokens<kHeld>(tokens + block * 16, job.k_blocks - block, lane % 4, x);
          };
          const uint32_t chunk = start + half * kSegments + c * in_round;
          const int bytes = job.bytes(c);
          if constexpr (kKind == ExpertKind::kW4A4) {
            if (slice != loaded || chunks > 1) load(c * kChunkBlocks), loaded = slice;
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
        }
        float* out = unit_sums(unit - units.begin, job, warp, half) + lane / 4 * kSliceRows + lane % 4 * 2;
        *reinterpret_cast<float2*>(out) = float2{acc[0], acc[1]};
        *reinterpret_cast<float2*>(out + 8 * kSliceRows) = float2{acc[2], acc[3]};
      }
      start += in_round * chunks;
    }
  }

  // The fp32 factor of an expert GEMM's result: gate, up or down.
  __device__ float scale(int64_t l, int expert, int which, ExpertKind kind) const {
    if (kind == ExpertKind::kBf16) return 1.0f;
    const int layer = static_cast<int>(l);
    const float weight = __ldg(a_.shared.scale_2 + (layer * static_cast<int>(p_.experts) + expert) * 3 + which);
    return kind == ExpertKind::kW4A4 ? weight * __ldg(a_.shared.input_scales + 2 * layer + (which == 2)) : weight;
  }

  // Adds up a batch: half a warp per unit and pair, lane j adds the segments of output column j.
  __device__ void finish_units(int64_t l, bool second, int batch) {
    const ExpertJob job = expert_job(p_, weights(), a_.region_bytes, l, second);
    const ExpertKind kind = expert_kind(l);
    const Range units = job.batch(part(s_.slices * job.groups, place_.index, place_.size), batch);
    if (thread_index() == 0)  // read again after the next barrier
      place_.chunk += (units.end - units.begin) * kSegments * job.unit_groups * job.chunks();
    const int j = thread_index() % 16;
    const float unit_of_sum = kind == ExpertKind::kW4A4 ? kCodeScale : 1.0f;
#pragma unroll 1
    for (int at = thread_index() / 16; at < (units.end - units.begin) * kSliceRows; at += kThreads / 16) {
      const int own = at / kSliceRows, column = at % kSliceRows, unit = units.begin + own, slice = unit / job.groups;
      const int begin = s_.first[slice], group = unit - slice * job.groups, expert = s_.expert[slice];
      const bool present = column < s_.first[slice + 1] - begin;
      if (!__any_sync(~0u, present)) continue;
      const int pair = s_.pairs[begin + (present ? column : 0)];
      float total[2];
#pragma unroll 1
      for (int half = 0; half < job.unit_groups; ++half) {
        const float factor = scale(l, expert, second ? 2 : half, kind);
        float s[kSegments];
#pragma unroll
        for (int r = 0; r < kSegments; ++r) s[r] = unit_sums(own, job, r, half)[j * kSliceRows + column] * unit_of_sum;
        (half ? total[1] : total[0]) = tree8(s) * factor;
      }
      if (!second) {
        push_hidden(l, kind, pair, group, to_bf16(silu(total[0]) * total[1]), present);
      } else if (present) {
        uint16_t* f =
            mine<uint16_t>(w_.f) + pair * static_cast<int>(p_.moe_columns()) + group * job.unit_groups * 16 + j;
        f[0] = to_bf16(total[0]);
        if (job.unit_groups == 2) f[16] = to_bf16(total[1]);
      }
    }
    if (second) finish_slices(l, job.groups, units);
  }

  // Sixteen lanes hold a 16-block of a pair's hidden row; all lanes of the warp come here, those of a pair that does
  // not exist store nothing. Every rank gets it: as codes and their scale, or as it is.
  __device__ __forceinline__ void push_hidden(int64_t l, ExpertKind kind, int pair, int group, uint16_t m,
                                              bool present) {
    const int j = thread_index() % 16, groups = static_cast<int>(p_.inner_columns()) / 16;
    const int per_source = kMaxRows * top_k() * groups * kBlockWords, at = (pair * groups + group) * kBlockWords;
    if (kind != ExpertKind::kW4A4) {
      const uint32_t word = pack(m, static_cast<uint16_t>(__shfl_down_sync(~0u, static_cast<uint32_t>(m), 1)));
      if (present && j % 2 == 0) push_all(w_.hidden, per_source, at + j / 2, word);
      return;
    }
    const Quantized q = quantize_lane(m, __ldg(a_.shared.input_scales + 2 * static_cast<int>(l) + 1));
    uint32_t word = q.code << (4 * (j % 8));
#pragma unroll
    for (int step = 1; step < 8; step *= 2) word |= __shfl_xor_sync(~0u, word, step);
    if (!present) return;
    // Lanes 0 to 7 hold the first word, 8 to 15 the second; each stores for rank j mod 8.
    uint64_t* slot = slots_to(j % kRanks, w_.hidden, per_source) + at;
    store_slot(slot + j / 8, word, place_.epoch);
    if (j < 8) store_slot(slot + 2, q.scale, place_.epoch);
  }

  // All ranks' blocks of the hidden rows -> operand rows of this rank.
  __device__ bool gather_hidden(int64_t l) {
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

 private:
  // Whoever stores the last outputs of a slice goes on to its pairs' sums of squares, without a meeting of the blocks.
  __device__ void finish_slices(int64_t l, int groups, Range units) {
    const int last = (units.end - 1) / groups;
    uint32_t* done = mine<uint32_t>(w_.slice_counts);
#pragma unroll 1
    for (int slice = units.begin / groups; slice <= last; ++slice) {
      sync_block();  // the outputs are stored, the flag is read
      if (thread_index() == 0) {
        const int own = min(units.end, (slice + 1) * groups) - max(units.begin, slice * groups);
        __threadfence();
        const bool all = static_cast<int>(atomicAdd(done + slice, static_cast<uint32_t>(own))) + own == groups;
        if (all) done[slice] = 0;  // for the next layer, which lies behind barriers
        __threadfence();
        s_.flag = all;
      }
      sync_block();
      if (s_.flag) push_sums_of_squares(l, s_.first[slice], s_.first[slice + 1]);
    }
  }

  // This rank's columns are segment me() of each pair's sum of squares: half a warp per pair, the result to every rank.
  __device__ void push_sums_of_squares(int64_t l, int begin, int end) {
    const int lane = thread_index() % 32, j = lane % 16, width = static_cast<int>(p_.moe_columns());
    const uint16_t* g = post_gain(l) + j;
#pragma unroll 1
    for (int at = begin + thread_index() / 32 * 2; at < end; at += 2 * kWarps) {
      const int pair = s_.pairs[min(at + lane / 16, end - 1)];
      const uint16_t* f = mine<uint16_t>(w_.f) + pair * width + j;
      float sum = 0.0f;
#pragma unroll 1
      for (int c0 = 0; c0 < width; c0 += 8 * kLanes) {
        uint16_t x[8], y[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const int c = min(c0 + e * kLanes, width - kLanes);
          x[e] = __ldcg(f + c);
          y[e] = __ldg(g + c);
        }
#pragma unroll
        for (int e = 0; e < 8; ++e)
          if (c0 + e * kLanes < width) {
            const float z = from_bf16(x[e]) * from_bf16(y[e]);
            sum = fma1(z, z, sum);
          }
      }
      sum = fold_warp(sum);
      if (j < kRanks) {
        fence_rank();  // the pair's outputs, of all blocks, lie behind its sum
        store_slot(slots_to(j, w_.sums, kMaxRows * top_k()) + pair, bit_cast<uint32_t>(sum), place_.epoch);
      }
    }
  }
};

}  // namespace muse
