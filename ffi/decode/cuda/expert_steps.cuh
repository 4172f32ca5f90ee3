// Experts of a layer, N-sharded over the ranks, and the weighted sum of their outputs.
#pragma once

#include "ffi/decode/cuda/expert_chain.cuh"
#include "ffi/decode/cuda/router_steps.cuh"

namespace muse {

constexpr int kSliceRows = 8;  // (row, slot) pairs of one pass through an expert's weights

class ExpertSteps : protected RouterSteps {
 public:
  using RouterSteps::RouterSteps;

 protected:
  // Pairs by expert, and slices, in shared memory: by every block for itself. The order inside an expert may differ
  // from block to block; it decides columns, not bits.
  __device__ void group_pairs() {
    const int pairs = rows() * static_cast<int>(p_.top_k), experts = static_cast<int>(p_.experts);
    int *count = region<int>(), *first = count + experts;
    uint16_t* place = reinterpret_cast<uint16_t*>(first + experts);  // of a pair among its expert's
    for (int e = thread_index(); e < experts; e += kThreads) count[e] = 0;
    sync_block();
    for (int j = thread_index(); j < pairs; j += kThreads)
      place[j] = static_cast<uint16_t>(atomicAdd(&count[__ldcg(mine<int32_t>(w_.router_experts) + j)], 1));
    sync_block();
    if (thread_index() < 32) {  // running sums over the experts: each lane has a stretch of them
      const int lane = thread_index(), each = (experts + 31) / 32, begin = min(lane * each, experts),
                end = min(begin + each, experts);
      const auto slices_of = [](int c) { return (c + kSliceRows - 1) / kSliceRows; };
      int own = 0, own_slices = 0;
      for (int e = begin; e < end; ++e) own += count[e], own_slices += slices_of(count[e]);
      int at = own, slice = own_slices;
      for (int step = 1; step < 32; step *= 2) {
        const int a = __shfl_up_sync(~0u, at, step), b = __shfl_up_sync(~0u, slice, step);
        if (lane >= step) at += a, slice += b;
      }
      if (lane == 31) s_.slices = slice, s_.first[slice] = static_cast<int16_t>(at);
      at -= own;
      slice -= own_slices;
      for (int e = begin; e < end; ++e) {
        first[e] = at;
        for (int c = 0; c < count[e]; c += kSliceRows, ++slice) {
          s_.expert[slice] = static_cast<int16_t>(e);
          s_.first[slice] = static_cast<int16_t>(at + c);
        }
        at += count[e];
      }
    }
    sync_block();
    for (int j = thread_index(); j < pairs; j += kThreads)
      s_.pairs[first[__ldcg(mine<int32_t>(w_.router_experts) + j)] + place[j]] = static_cast<uint16_t>(j);
    sync_block();
  }

  // The operand row of a pair: GEMM 1 reads rows, GEMM 2 pairs.
  __device__ const uint16_t* token_row(bool second, int pair) const {
    return second ? mine<uint16_t>(w_.hidden_rows) + pair * expert_row(p_.moe_inner)
                  : mine<uint16_t>(w_.x) + pair / static_cast<int>(p_.top_k) * expert_row(p_.moe_hidden);
  }

  // Segment sums of a batch of units: [unit][segment][row group of the unit][row][column], in the region.
  __device__ float* unit_sums(int unit_in_batch, const ExpertJob& job, int segment, int half) const {
    return region<float>() + ((unit_in_batch * kSegments + segment) * job.unit_groups + half) * 16 * kSliceRows;
  }

  // This block's units of one GEMM, all sixteen warps on one unit of the first or two of the second; done(unit, index
  // in the batch) by half a warp per unit and pair, once a batch's sums are there.
  __device__ void expert_gemm(int64_t l, bool second) {
    const int warp = thread_index() / 32, g = thread_index() % 32 / 4, t = thread_index() % 4;
    const int segment = warp % kSegments, half = warp / kSegments;
    const ExpertJob job = expert_job(p_, weights(), a_.region_bytes, l, second);
    const ExpertKind kind = !p_.kind[l].nvfp4          ? ExpertKind::kBf16
                            : p_.quantize_activations ? ExpertKind::kW4A4
                                                      : ExpertKind::kW4A16;
    const Range range = part(int64_t{s_.slices} * job.groups, place_.index, place_.size);
    const int at_once = job.units_at_once(), chunks = job.chunks();
    const int panel_row = static_cast<int>(p_.panels(second ? p_.moe_inner : p_.moe_hidden)) * kPanelBlocks * 16;
    uint32_t start = place_.chunk;
    TokenOperand x;
    int loaded = -1;  // the slice in x
    for (int batch = 0; batch < job.batches(range); ++batch) {
      const Range units = job.batch(range, batch);
      for (int first = units.begin; first < units.end; first += at_once) {
        const int in_round = min(at_once, units.end - first), readers = kSegments * job.unit_groups * in_round;
        if (warp < readers) {
          const int unit = second ? first + half : first, slice = unit / job.groups;
          float acc[4] = {};
          for (int c = 0; c < chunks;) {
            if (slice != loaded || chunks > chunks_of_span(kind)) {
              const int pair = s_.first[slice] + g < s_.first[slice + 1] ? s_.first[slice] + g : s_.first[slice];
              const int block = c / chunks_of_span(kind) * kSpanBlocks;
              load_tokens(token_row(second, s_.pairs[pair]) + segment * panel_row + block * 16,
                          job.k_blocks - block, t, x);
              loaded = slice;
            }
            c = chain_span(kind, job, start + warp, c, chunks, readers, 4 * g + t, x, acc);
          }
          float* out = unit_sums(second ? unit - units.begin : first - units.begin, job, segment, second ? 0 : half);
          *reinterpret_cast<float2*>(out + g * kSliceRows + 2 * t) = float2{acc[0], acc[1]};
          *reinterpret_cast<float2*>(out + (g + 8) * kSliceRows + 2 * t) = float2{acc[2], acc[3]};
        }
        start += readers * chunks;
      }
      sync_block();
      finish_units(l, job, units, kind, second);
      sync_block();
    }
    if (thread_index() == 0) place_.chunk = start;  // read after the next barrier
  }

  __device__ static int chunks_of_span(ExpertKind kind) {
    return kind == ExpertKind::kBf16 ? kSpanBlocks / kSlotTiles : 1;
  }

  // Chunks c, ... of this warp's task, as many as x covers; returns the next. `first`: the task's chunk 0.
  __device__ __forceinline__ int chain_span(ExpertKind kind, const ExpertJob& job, uint32_t first, int c, int chunks, int readers, int lane,
                                            const TokenOperand& x, float (&acc)[4]) {
    if (kind != ExpertKind::kBf16) {
      const uint32_t chunk = first + c * readers;
      const unsigned char* weights = ring_.wait(chunk);
      const int panels = job.bytes(c) / kPanelBytes;
      if (kind == ExpertKind::kW4A4)
        chain_panels<ExpertKind::kW4A4>(weights, panels, lane, x, acc);
      else
        chain_panels<ExpertKind::kW4A16>(weights, panels, lane, x, acc);
      ring_.release(chunk, lane);
      return c + 1;
    }
    const auto tiles = [&](auto part) {
      constexpr int kPart = decltype(part)::value;
      if (c >= chunks) return;
      const uint32_t chunk = first + c * readers;
      chain_expert_tiles<kPart * kSlotTiles>(ring_.wait(chunk), job.bytes(c) / (kTile * 2), lane, x, acc);
      ring_.release(chunk, lane);
      ++c;
    };
    tiles(Constant<0>{});
    tiles(Constant<1>{});
    tiles(Constant<2>{});
    tiles(Constant<3>{});
    return c;
  }

  template <int kValue>
  struct Constant {
    static constexpr int value = kValue;
  };

  // The fp32 factor of an expert GEMM's result: gate, up or down.
  __device__ float scale(int64_t l, int64_t expert, int which, ExpertKind kind) const {
    if (kind == ExpertKind::kBf16) return 1.0f;
    const float weight = a_.shared.scale_2[(l * p_.experts + expert) * 3 + which];
    return kind == ExpertKind::kW4A4 ? weight * a_.shared.input_scales[2 * l + (which == 2)] : weight;
  }

  // Half a warp per unit and pair: lane j adds the segments of output column j.
  __device__ void finish_units(int64_t l, const ExpertJob& job, Range units, ExpertKind kind, bool second) {
    const int worker = thread_index() / 16, j = thread_index() % 16;
    const float unit_of_sum = kind == ExpertKind::kW4A4 ? kCodeScale : 1.0f;
    for (int at = worker; at < (units.end - units.begin) * kSliceRows; at += kThreads / 16) {
      const int unit = units.begin + at / kSliceRows, column = at % kSliceRows, slice = unit / job.groups;
      const bool present = column < s_.first[slice + 1] - s_.first[slice];
      const auto total = [&](int half) {
        float s[kSegments];
        for (int r = 0; r < kSegments; ++r)
          s[r] = unit_sums(unit - units.begin, job, r, half)[j * kSliceRows + column] * unit_of_sum;
        return tree8(s);
      };
      const int pair = s_.pairs[s_.first[slice] + (present ? column : 0)], group = unit % job.groups;
      const int64_t expert = s_.expert[slice];
      if (second) {
        if (present)
          mine<uint16_t>(w_.f)[pair * p_.moe_columns() + group * 16 + j] =
              to_bf16(total(0) * scale(l, expert, 2, kind));
      } else {
        const float gate = total(0) * scale(l, expert, 0, kind), up = total(1) * scale(l, expert, 1, kind);
        push_hidden(l, kind, pair, group, to_bf16(silu(gate) * up), present);
      }
    }
  }

  // Sixteen lanes hold a 16-block of a pair's hidden row; all lanes of the warp come here, those of a pair that does
  // not exist store nothing. Every rank gets it: as codes and their scale, or as it is.
  __device__ void push_hidden(int64_t l, ExpertKind kind, int pair, int group, uint16_t m, bool present) {
    const int j = thread_index() % 16;
    const int64_t groups = p_.inner_columns() / 16, per_source = kMaxRows * p_.top_k * groups * kBlockWords;
    const int64_t at = (pair * groups + group) * kBlockWords;
    if (kind != ExpertKind::kW4A4) {
      const uint32_t word = pack(m, static_cast<uint16_t>(__shfl_down_sync(~0u, m, 1)));
      if (present && j % 2 == 0) push_all(w_.hidden, per_source, at + j / 2, word);
      return;
    }
    // quantize_block of formats.h, one element per lane.
    const float x = from_bf16(m), input_scale = a_.shared.input_scales[2 * l + 1];
    float amax = abs32(x);
    bool finite = bf16_finite(m);
    for (int step = 1; step < 16; step *= 2) {
      const float other = __shfl_xor_sync(~0u, amax, step);
      amax = other > amax ? other : amax;
      finite = __shfl_xor_sync(~0u, finite, step) && finite;
    }
    const uint8_t sf = finite ? to_e4m3_sat((amax / 6.0f) / input_scale) : kNan8;
    const bool zero = sf == 0 || sf == kNan8;
    uint32_t word = zero ? 0u : to_e2m1_sat(x / (from_e4m3(sf) * input_scale)) << (4 * (j % 8));
    for (int step = 1; step < 8; step *= 2) word |= __shfl_xor_sync(~0u, word, step);
    if (!present) return;
    // Lanes 0 to 7 hold the first word, 8 to 15 the second; each stores for rank j mod 8.
    uint64_t* slot = slots_to(j % kRanks, w_.hidden, per_source) + at;
    store_slot(slot + j / 8, word, place_.epoch);
    if (j < 8) store_slot(slot + 2, sf, place_.epoch);
  }

  // All ranks' blocks of the hidden rows -> operand rows of this rank.
  __device__ bool gather_hidden(int64_t l) {
    const int64_t pairs = rows() * p_.top_k, groups = p_.inner_columns() / 16, blocks = p_.moe_inner / 16;
    const int64_t per_source = kMaxRows * p_.top_k * groups * kBlockWords;
    const bool quantize = p_.kind[l].nvfp4 && p_.quantize_activations;
    for (int64_t at = place_.index * kThreads + thread_index(); at < pairs * blocks;
         at += int64_t{place_.size} * kThreads) {
      const int64_t pair = at / blocks, block = at % blocks;
      const int source = static_cast<int>(block / groups);
      const uint64_t* slot = slots_from(source, w_.hidden, per_source) + (pair * groups + block % groups) * kBlockWords;
      uint16_t* out = mine<uint16_t>(w_.hidden_rows) + pair * expert_row(p_.moe_inner);
      const auto fetch = [&](auto& word) {
        wait(
            Phase::kHidden, [&](int e) { return slot + e; }, [&](int) { return source; }, word);
      };
      if (!quantize) {
        uint32_t word[8] = {};
        fetch(word);
        uint16_t x[16];
        for (int k = 0; k < 16; ++k) x[k] = static_cast<uint16_t>(word[k / 2] >> (16 * (k % 2)));
        store_operand(x, out, p_.moe_inner, block);
        continue;
      }
      uint32_t word[3] = {};
      fetch(word);
      uint8_t codes[16];
      for (int k = 0; k < 16; ++k) codes[k] = word[k / 8] >> (4 * (k % 8)) & 15u;
      store_codes(codes, static_cast<uint8_t>(word[2]), out, p_.moe_inner, block);
    }
    return all_alive();
  }

  __device__ const uint16_t* post_gain(int64_t l) const {
    return a_.shared.moe_gains + (2 * l + 1) * p_.moe_hidden + me() * p_.moe_columns();
  }

  // This rank's columns are segment me() of each pair's sum of squares: half a warp per pair, the result to every rank.
  __device__ void sums_of_squares(int64_t l) {
    const int lane = thread_index() % 32, j = lane % 16;
    const int pairs = rows() * static_cast<int>(p_.top_k), width = static_cast<int>(p_.moe_columns());
    const uint16_t* g = post_gain(l);
    for (int unit = thread_index() / 32 * place_.size + place_.index; 2 * unit < pairs; unit += place_.size * kWarps) {
      const int pair = min(2 * unit + lane / 16, pairs - 1);
      const uint16_t* f = mine<uint16_t>(w_.f) + int64_t{pair} * width;
      float sum = 0.0f;
#pragma unroll 8
      for (int c = j; c < width; c += kLanes) {
        const float z = from_bf16(__ldcg(f + c)) * from_bf16(g[c]);
        sum = fma1(z, z, sum);
      }
      sum = fold_warp(sum);
      if (j < kRanks)
        store_slot(slots_to(j, w_.sums, kMaxRows * p_.top_k) + pair, bit_cast<uint32_t>(sum), place_.epoch);
    }
  }

  struct CombineRegion {
    float rho[kMaxTopK], weight[kMaxTopK];
    int32_t expert[kMaxTopK], order[kMaxTopK];
  };

  // This rank's columns of the weighted sum over the chosen experts, as operand of post_expert_proj.
  __device__ bool combine_rows(int64_t l) {
    const int k_count = static_cast<int>(p_.top_k);
    const int64_t width = p_.moe_columns();
    const uint16_t* g = post_gain(l);
    CombineRegion& sh = *region<CombineRegion>();
    for (int i = place_.index; i < rows(); i += place_.size) {
      sync_block();
      if (thread_index() < k_count) {
        const int64_t pair = int64_t{i} * k_count + thread_index();
        uint32_t word[kRanks] = {};
        wait(
            Phase::kCombine, [&](int r) { return slots_from(r, w_.sums, kMaxRows * k_count) + pair; },
            [](int r) { return r; }, word);
        float s[kRanks];
        for (int r = 0; r < kRanks; ++r) s[r] = bit_cast<float>(word[r]);
        sh.rho[thread_index()] = inverse_rms(tree8(s), p_.moe_hidden, p_.post_eps);
        sh.expert[thread_index()] = __ldcg(mine<int32_t>(w_.router_experts) + pair);
        sh.weight[thread_index()] = __ldcg(mine<float>(w_.router_weights) + pair);
      }
      if (!all_alive()) return false;
      if (thread_index() < k_count) {
        int at = 0;
        for (int k = 0; k < k_count; ++k) at += sh.expert[k] < sh.expert[thread_index()];
        sh.order[at] = thread_index();
      }
      sync_block();
      for (int64_t c = thread_index(); c < width; c += kThreads) {
        float x = 0.0f;
#pragma unroll 8
        for (int k = 0; k < k_count; ++k) {
          const int slot = sh.order[k];
          const float z =
              from_bf16(__ldcg(mine<uint16_t>(w_.f) + (int64_t{i} * k_count + slot) * width + c)) * from_bf16(g[c]);
          x = fma1(sh.weight[slot], z * sh.rho[slot], x);
        }
        mine<uint16_t>(w_.combined)[column_tile_at(i, c, width)] = to_bf16(x);
      }
    }
    return true;
  }

  // From h to the operand of post_expert_proj.
  __device__ bool moe(int64_t l) {
    pool(l);
    if (!route_rows(l) || !rank_barrier(Phase::kExperts)) return false;
    group_pairs();
    if (thread_index() == 0) ring_.experts_known();
#pragma unroll 1  // one copy of the code
    for (int second = 0; second < 2; ++second) {
      expert_gemm(l, second);
      if (!second && !gather_hidden(l)) return false;
      if (!rank_barrier(second ? Phase::kCombine : Phase::kHidden)) return false;
    }
    sums_of_squares(l);
    return combine_rows(l) && rank_barrier(Phase::kCombine);
  }
};

}  // namespace muse
