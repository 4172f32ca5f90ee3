// Experts of a layer, N-sharded over the ranks, and the weighted sum of their outputs.
#pragma once

#include "ffi/decode/cuda/router_steps.cuh"

namespace muse {

class ExpertSteps : protected RouterSteps {
 public:
  using RouterSteps::epoch;
  using RouterSteps::RouterSteps;

 protected:
  // Pairs ordered by expert, in shared memory, by every block for itself.
  __device__ void group_pairs() {
    const int pairs = n_ * static_cast<int>(p_.top_k), experts = static_cast<int>(p_.experts);
    __shared__ uint16_t count[1024];
    int32_t* chosen = reinterpret_cast<int32_t*>(s_.row);
    __syncthreads();
    for (int j = threadIdx.x; j < pairs; j += kThreads) chosen[j] = mine<int32_t>(w_.router_experts)[j];
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += kThreads) {
      int c = 0;
      for (int j = 0; j < pairs; ++j) c += chosen[j] == e;
      count[e] = static_cast<uint16_t>(c);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int used = 0, at = 0;
      for (int e = 0; e < experts; ++e) {
        const int c = count[e];
        count[e] = static_cast<uint16_t>(at);
        if (c == 0) continue;
        s_.expert[used] = static_cast<int16_t>(e);
        s_.first[used++] = static_cast<int16_t>(at);
        at += c;
      }
      s_.first[used] = static_cast<int16_t>(at);
      s_.used = used;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += kThreads) {
      int at = count[e];
      for (int j = 0; j < pairs; ++j)
        if (chosen[j] == e) s_.pairs[at++] = j;
    }
    __syncthreads();
  }

  // One segment of an expert GEMM for the pass of pairs that starts at c0.
  __device__ void expert_chain(int64_t l, bool second, int64_t tile, int64_t width, int c0, int n, const int32_t* list,
                               Accumulators& acc) {
    const int warp = threadIdx.x / 32, t = threadIdx.x % 4;
    const int64_t segment = width / 16 / kSegments;
    const uint16_t* operand = mine<uint16_t>(second ? w_.hidden_rows : w_.x) + warp * segment * 16;
    const int divisor = second ? 1 : static_cast<int>(p_.top_k);  // GEMM 1 reads rows, GEMM 2 pairs
    const Columns x = columns(operand, width, c0, n, list, divisor);
    tile += warp * segment;
    clear(acc);
    const RankPointers& r = weights();
    if (!p_.kind[l].nvfp4) {
      chain_bf16((second ? r.w2_bf16 : r.w13_bf16) + tile * kTile, segment, x, acc);
      return;
    }
    const uint32_t* codes = (second ? r.w2_codes : r.w13_codes) + tile * kTileWords;
    const uint8_t* scales = (second ? r.w2_scales : r.w13_scales) + tile * kTileScales;
    if (!p_.quantize_activations) {
      chain_w4a16(codes, scales, segment, x, acc);
      return;
    }
    const float* x_scales = mine<float>(second ? w_.hidden_scales : w_.x_scales) + warp * segment;
    const float* column_scales[2][2];
    for (int b = 0; b < 2; ++b)
      for (int e = 0; e < 2; ++e) {
        const int c = c0 + 8 * b + 2 * t + e < n ? c0 + 8 * b + 2 * t + e : 0;
        column_scales[b][e] = x_scales + list[c] / divisor * (width / 16);
      }
    chain_w4a4(codes, scales, segment, x, column_scales, acc);
  }

  // The fp32 factor of an expert GEMM's result: gate, up or down.
  __device__ float scale(int64_t l, int64_t expert, int which) const {
    if (!p_.kind[l].nvfp4) return 1.0f;
    const float weight = a_.shared.scale_2[(l * p_.experts + expert) * 3 + which];
    return p_.quantize_activations ? weight * a_.shared.input_scales[2 * l + (which == 2)] : weight;
  }

  // GEMM 1 and SwiGLU: a unit is one expert's 16 gate and 16 up columns; its 16 results per pair go to every rank.
  __device__ void first_gemm(int64_t l) {
    const int64_t groups = p_.inner_columns() / 16, blocks = p_.moe_hidden / 16;
    const int64_t per_source = kMaxRows * p_.top_k * groups * kBlockWords;
    const bool quantize = p_.kind[l].nvfp4 && p_.quantize_activations;
    auto& sh = s_.experts;
    for (int64_t unit = place_.index; unit < s_.used * groups; unit += place_.size) {
      const int64_t e = unit / groups, group = unit % groups, expert = s_.expert[e];
      const int32_t* list = s_.pairs + s_.first[e];
      const int n = s_.first[e + 1] - s_.first[e];
      const int64_t tile = p_.w13_tile(l, expert) + 2 * group * blocks;
      const float gate_scale = scale(l, expert, 0), up_scale = scale(l, expert, 1);
      for (int c0 = 0; c0 < n; c0 += kColumns) {
        __syncthreads();
        for (int half = 0; half < 2; ++half) {
          Accumulators acc;
          expert_chain(l, false, tile + half * blocks, p_.moe_hidden, c0, n, list, acc);
          sh.sums[half].store(acc);
        }
        __syncthreads();
        const int count = min(kColumns, n - c0);
        for (int at = threadIdx.x; at < 16 * count; at += kThreads) {
          const float gate = sh.sums[0].total(at % 16, at / 16) * gate_scale;
          const float up = sh.sums[1].total(at % 16, at / 16) * up_scale;
          sh.m[at / 16][at % 16] = to_bf16(silu(gate) * up);
        }
        __syncthreads();
        for (int at = threadIdx.x; at < count * kRanks; at += kThreads) {
          const int c = at / kRanks, to = at % kRanks;
          uint64_t* slot = slots(to, w_.hidden, me_, per_source) + (list[c0 + c] * groups + group) * kBlockWords;
          if (!quantize) {
            for (int k = 0; k < 8; ++k) store_slot(slot + k, pack(sh.m[c][2 * k], sh.m[c][2 * k + 1]), place_.epoch);
            continue;
          }
          uint8_t codes[16];
          const uint8_t sf = quantize_block(sh.m[c], a_.shared.input_scales[2 * l + 1], codes);
          uint32_t words[2] = {};
          for (int k = 0; k < 16; ++k) words[k / 8] |= static_cast<uint32_t>(codes[k]) << (4 * (k % 8));
          store_slot(slot, words[0], place_.epoch);
          store_slot(slot + 1, words[1], place_.epoch);
          store_slot(slot + 2, sf, place_.epoch);
        }
      }
    }
  }

  // All ranks' blocks of the hidden rows -> operand rows of this rank.
  __device__ bool gather_hidden(int64_t l) {
    const int64_t pairs = n_ * p_.top_k, groups = p_.inner_columns() / 16, blocks = p_.moe_inner / 16;
    const int64_t per_source = kMaxRows * p_.top_k * groups * kBlockWords;
    const bool quantize = p_.kind[l].nvfp4 && p_.quantize_activations;
    bool alive = true;
    for (int64_t at = place_.index * kThreads + threadIdx.x; at < pairs * blocks && alive;
         at += int64_t{place_.size} * kThreads) {
      const int64_t pair = at / blocks, block = at % blocks;
      const int source = static_cast<int>(block / groups);
      const uint64_t* slot = slots(me_, w_.hidden, source, per_source) + (pair * groups + block % groups) * kBlockWords;
      uint16_t* out = mine<uint16_t>(w_.hidden_rows) + pair * p_.moe_inner + block * 16;
      if (!quantize) {
        for (int k = 0; k < 8; ++k) {
          const uint32_t word = wait_slot(place_, slot + k, place_.epoch, Phase::kHidden, source, alive);
          out[permuted(2 * k)] = static_cast<uint16_t>(word);
          out[permuted(2 * k + 1)] = static_cast<uint16_t>(word >> 16);
        }
        continue;
      }
      uint8_t codes[16];
      for (int w = 0; w < 2; ++w) {
        const uint32_t word = wait_slot(place_, slot + w, place_.epoch, Phase::kHidden, source, alive);
        for (int k = 0; k < 8; ++k) codes[8 * w + k] = word >> (4 * k) & 15u;
      }
      const uint32_t sf = wait_slot(place_, slot + 2, place_.epoch, Phase::kHidden, source, alive);
      store_codes(codes, static_cast<uint8_t>(sf), out, mine<float>(w_.hidden_scales) + pair * blocks + block);
    }
    return __syncthreads_and(alive);
  }

  // GEMM 2: this rank's columns of every pair's output.
  __device__ void second_gemm(int64_t l) {
    const int64_t groups = p_.moe_columns() / 16, blocks = p_.moe_inner / 16;
    for (int64_t unit = place_.index; unit < s_.used * groups; unit += place_.size) {
      const int64_t e = unit / groups, group = unit % groups, expert = s_.expert[e];
      const int32_t* list = s_.pairs + s_.first[e];
      const int n = s_.first[e + 1] - s_.first[e];
      const float down_scale = scale(l, expert, 2);
      for (int c0 = 0; c0 < n; c0 += kColumns) {
        Accumulators acc;
        expert_chain(l, true, p_.w2_tile(l, expert) + group * blocks, p_.moe_inner, c0, n, list, acc);
        __syncthreads();
        s_.sums[0].store(acc);
        __syncthreads();
        const int count = min(kColumns, n - c0);
        for (int at = threadIdx.x; at < 16 * count; at += kThreads)
          mine<uint16_t>(w_.f)[list[c0 + at / 16] * p_.moe_columns() + group * 16 + at % 16] =
              to_bf16(s_.sums[0].total(at % 16, at / 16) * down_scale);
        __syncthreads();
      }
    }
  }

  __device__ const uint16_t* post_gain(int64_t l) const {
    return a_.shared.moe_gains + (2 * l + 1) * p_.moe_hidden + me_ * p_.moe_columns();
  }

  // This rank's columns are segment me_ of each pair's sum of squares: one warp per pair, the result to every rank.
  __device__ void sums_of_squares(int64_t l) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t pairs = n_ * p_.top_k, width = p_.moe_columns();
    const uint16_t* g = post_gain(l);
    for (int64_t pair = place_.index * kWarps + warp; pair < pairs; pair += int64_t{place_.size} * kWarps) {
      const uint16_t* f = mine<uint16_t>(w_.f) + pair * width;
      float sum = 0.0f;
      if (lane < kLanes)
        for (int64_t c = lane; c < width; c += kLanes) {
          const float z = from_bf16(f[c]) * from_bf16(g[c]);
          sum = fma1(z, z, sum);
        }
      sum = fold_warp(sum);
      if (lane < kRanks)
        store_slot(slots(lane, w_.sums, me_, kMaxRows * p_.top_k) + pair, bit_cast<uint32_t>(sum), place_.epoch);
    }
  }

  // This rank's columns of the weighted sum over the chosen experts, as operand of post_expert_proj.
  __device__ bool combine_rows(int64_t l) {
    const int k_count = static_cast<int>(p_.top_k);
    const int64_t width = p_.moe_columns();
    const uint16_t* g = post_gain(l);
    auto& sh = s_.combine;
    bool alive = true;
    for (int i = place_.index; i < n_; i += place_.size) {
      __syncthreads();
      if (threadIdx.x < k_count) {
        const int64_t pair = int64_t{i} * k_count + threadIdx.x;
        float s[kRanks];
        for (int r = 0; r < kRanks; ++r)
          s[r] = bit_cast<float>(wait_slot(place_, slots(me_, w_.sums, r, kMaxRows * k_count) + pair, place_.epoch,
                                           Phase::kCombine, r, alive));
        sh.rho[threadIdx.x] = inverse_rms(tree8(s), p_.moe_hidden, p_.post_eps);
        sh.expert[threadIdx.x] = mine<int32_t>(w_.router_experts)[pair];
        sh.weight[threadIdx.x] = mine<float>(w_.router_weights)[pair];
      }
      if (!__syncthreads_and(alive)) return false;
      if (threadIdx.x < k_count) {
        int at = 0;
        for (int k = 0; k < k_count; ++k) at += sh.expert[k] < sh.expert[threadIdx.x];
        sh.order[at] = threadIdx.x;
      }
      __syncthreads();
      for (int64_t c = threadIdx.x; c < width; c += kThreads) {
        float x = 0.0f;
        for (int k = 0; k < k_count; ++k) {
          const int slot = sh.order[k];
          const float z = from_bf16(mine<uint16_t>(w_.f)[(int64_t{i} * k_count + slot) * width + c]) * from_bf16(g[c]);
          x = fma1(sh.weight[slot], z * sh.rho[slot], x);
        }
        mine<uint16_t>(w_.combined)[i * width + permuted(c)] = to_bf16(x);
      }
    }
    return true;
  }

  __device__ bool moe(int64_t l) {
    if (!rank_barrier(place_, Phase::kRouter)) return false;  // h is written
    router_dots(l);
    const int64_t half = p_.moe_columns() / 2;
    // Two neighbouring columns travel in one word: the even one's thread fetches the odd one's sum itself.
    column_parallel(place_, n_, s_.sums[0], weights().pre_expert + p_.pre_expert(l), p_.moe_columns() / 16,
                    mine<uint16_t>(w_.h), p_.hidden, [&](int64_t group, int i, int c, float sum) {
                      if (c % 2) return;
                      const uint32_t word = pack(to_bf16(sum), to_bf16(s_.sums[0].total(c + 1, i % kColumns)));
                      push_all(w_.pooled, kMaxRows * half, i * half + (group * 16 + c) / 2, word);
                    });
    if (!route_rows(l)) return false;
    if (!rank_barrier(place_, Phase::kExperts)) return false;
    group_pairs();
    first_gemm(l);
    if (!gather_hidden(l) || !rank_barrier(place_, Phase::kHidden)) return false;
    second_gemm(l);
    if (!rank_barrier(place_, Phase::kCombine)) return false;
    sums_of_squares(l);
    if (!combine_rows(l) || !rank_barrier(place_, Phase::kCombine)) return false;
    return row_parallel(weights().post_expert + p_.post_expert(l), mine<uint16_t>(w_.combined), p_.moe_columns(), 1,
                        Phase::kCombine) &&
           branch(l, 1);
  }
};

}  // namespace muse
