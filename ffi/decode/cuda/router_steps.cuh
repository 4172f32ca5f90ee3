// Router of a layer: the choice of experts, and the pooled rows as expert operands.
#pragma once

#include <cuda_fp16.h>

#include "ffi/decode/cuda/attention_steps.cuh"

namespace muse {

// The quantiser's two steps, one piece of code for both operands.
inline __device__ __noinline__ uint8_t block_scale(float amax, bool finite, float input_scale) {
  return activation_scale(amax, finite, input_scale);
}
inline __device__ __noinline__ uint32_t code_of(float x, float divisor) { return to_e2m1_sat(x / divisor); }

class RouterSteps : public AttentionSteps {
 public:
  using AttentionSteps::AttentionSteps;

  // Every rank routes every row for itself. A row's choice of experts and its expert operand are for two blocks.
  __device__ bool route_rows() {
#pragma unroll 1
    for (int unit = first_unit(4); unit < 2 * rows(); unit += blocks()) {
      sync_block();
      if (!(unit % 2 ? run_phase<&RouterSteps::make_operand>(unit / 2)
                     : run_phase<&RouterSteps::choose_experts>(unit / 2)))
        return false;
    }
    return true;
  }

 protected:
  struct RouterRegion {
    uint32_t key[1024];
    float probability[1024];
    int32_t chosen[kMaxTopK], order[kMaxTopK];
  };

  // Expert operands are rows of 16-bit numbers, each of eight segments padded to whole panels; a pair of 16-blocks lies
  // so that lane (g, t) reads the four registers of column g with one 16-byte load.
  __device__ int expert_row(int k) const { return kSegments * panel_blocks(k) * 16; }
  __device__ int panel_blocks(int k) const {  // of a segment
    return (k / 128 + static_cast<int>(kPanelBlocks) - 1) & ~(static_cast<int>(kPanelBlocks) - 1);
  }

  // Where 16-block b of a row of k numbers starts; numbers 2t, 2t+1, 2t+8, 2t+9 of it stand from 8 t on.
  __device__ uint16_t* operand_block(uint16_t* row, int k, int b) const {
    const int blocks = k / 128, segment = b / blocks, own = b - segment * blocks;
    return row + (segment * panel_blocks(k) + (own & ~1)) * 16 + (own & 1) * 4;
  }

  // Code times block scale has six significant bits: exact in fp16.
  __device__ static uint16_t code_value(uint32_t code, float scale) {
    return __half_as_ushort(__float2half_rn(from_e2m1(code) * scale));
  }

  // Two neighbouring codes (the low byte's nibbles) times their scale, given twice as fp16. (eem) << 9 is the fp16
  // number code * 2^-14.
  __device__ static uint32_t code_pair(uint32_t codes, __half2 scale) {
    const uint32_t bits = (codes & 7u) << 9 | (codes & 8u) << 12 | (codes & 0x70u) << 21 | (codes & 0x80u) << 24;
    const __half2 value = __hmul2(__hmul2(bit_cast<__half2>(bits), __half2half2(__float2half_rn(16384.0f))), scale);
    return bit_cast<uint32_t>(value);
  }

  // quantize_block of formats.h, one of the block's sixteen numbers per lane; all lanes of the warp come here.
  struct Quantized {
    uint8_t scale;
    uint32_t code;
  };
  __device__ static Quantized quantize_lane(uint16_t x, float input_scale) {
    float amax = abs32(from_bf16(x));
    bool finite = bf16_finite(x);
#pragma unroll
    for (int step = 1; step < 16; step *= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, step));
      finite = __shfl_xor_sync(~0u, finite, step) && finite;
    }
    const uint8_t sf = block_scale(amax, finite, input_scale);
    return {sf, sf == 0 || sf == kNan8 ? 0u : code_of(from_bf16(x), from_e4m3(sf) * input_scale)};
  }

 private:
  __device__ bool choose_experts(int i) {
    const int l = layer();
    const int own = static_cast<int>(p_.experts_rank()), experts = static_cast<int>(p_.experts);
    RouterRegion& sh = *region<RouterRegion>();
#pragma unroll 1
    for (int e = thread_index(); e < experts; e += kThreads) {
      const int source = e / own;
      const float bias = __ldg(a_.shared.router_bias + l * experts + e);
      const uint64_t* first =
          slots_from(source, w_.logits, kMaxRows * own * kSegments) + (i * own + e - source * own) * kSegments;
      const float probability = sigmoid_of(wait_sum(place_, Phase::kRouter, first, 1, source) * p_.router_multiplier);
      sh.probability[e] = probability;
      sh.key[e] = sortable(probability + bias);
    }
    if (!all_alive()) return false;
    rank_experts(sh, experts);
    sync_block();
    if (thread_index() < 32) weigh(l, i, sh);
    return true;
  }

  // The pooled row, normed, as expert operand.
  __device__ bool make_operand(int i) {
    fetch_pooled(i);
    if (!all_alive()) return false;
    const float sum = block_sumsq(moe_hidden(), region<float>(), s_.partial);
    run_phase<&RouterSteps::write_operand>(i, rms_factor(sum, moe_hidden(), p_.eps));
    return true;
  }

  // Pairs of columns -> the region: as floats; behind them their gains, for which the normed row will stand.
  __device__ void fetch_pooled(int i) {
    const int half = static_cast<int>(p_.moe_columns()) / 2, pairs = kRanks * half;
    float2* row = region<float2>();
    uint32_t *two = region<uint32_t>(), *words = two + 2 * pairs;
    const uint4* gains = reinterpret_cast<const uint4*>(a_.shared.moe_gains + 2 * layer() * moe_hidden());
#pragma unroll 1
    for (int c = thread_index(); c < moe_hidden() / 8; c += kThreads)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(words) + 16 * c), "l"(gains + c)
                   : "memory");
    const uint64_t* pooled = slots_from(0, w_.pooled, kMaxRows * half) + i * half;
#pragma unroll 1
    for (int c = thread_index(); c < half; c += kThreads) {
      wait_words(place_, Phase::kRouter, pooled + c, kMaxRows * half, kRanks, -1, two + 2 * c, 2 * half);
#pragma unroll 1
      for (int at = c; at < pairs; at += half) row[at] = {low_bf16(two[2 * at]), high_bf16(two[2 * at])};
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

  // A 16-block per thread. Two loops over a block's words, not one long piece of code: it runs once per layer, out of a
  // cold instruction cache. Threads start at different words, for the banks' sake.
  __device__ void write_operand(int i, float r) {
    const int l = layer();
    const float2* row = region<float2>();
    uint32_t* words = region<uint32_t>() + moe_hidden();
    uint16_t* out = mine<uint16_t>(w_.x) + i * expert_row(moe_hidden());
    const bool quantized = p_.kind[l].nvfp4 && p_.quantize_activations;
    const float input_scale = a_.shared.input_scales[2 * l];
#pragma unroll 1
    for (int b = thread_index(); b < moe_hidden() / 16; b += kThreads) {
      float amax = 0.0f;
      bool finite = true;
#pragma unroll 1
      for (int k0 = 0; k0 < 8; ++k0) {
        const int at = 8 * b + (k0 + b) % 8;
        const float2 v = row[at];
        const uint32_t gain = words[at];
        const uint16_t x = to_bf16((v.x * r) * low_bf16(gain)), y = to_bf16((v.y * r) * high_bf16(gain));
        words[at] = pack(x, y);
        amax = fmaxf(amax, fmaxf(abs32(from_bf16(x)), abs32(from_bf16(y))));
        finite = finite && bf16_finite(x) && bf16_finite(y);
      }
      const uint8_t sf = block_scale(amax, finite, input_scale);
      const bool zero = sf == 0 || sf == kNan8;
      const float scale = from_e4m3(sf), divisor = scale * input_scale;
      uint32_t* to = reinterpret_cast<uint32_t*>(operand_block(out, moe_hidden(), b));
#pragma unroll 1
      for (int k0 = 0; k0 < 8; ++k0) {
        const int k = (k0 + b) % 8;
        uint32_t two = words[8 * b + k];
        if (quantized) {  // what the codes and their scale stand for
          const uint32_t x = zero ? 0u : code_of(low_bf16(two), divisor);
          const uint32_t y = zero ? 0u : code_of(high_bf16(two), divisor);
          two = pack(code_value(x, scale), code_value(y, scale));
        }
        to[k % 4 * 4 + k / 4] = two;
      }
    }
  }

  // Keys as unsigned numbers of the same order; NaN below all others.
  __device__ static uint32_t sortable(float key) {
    const uint32_t bits = bit_cast<uint32_t>(key == 0.0f ? 0.0f : key);  // -0 and +0 are equal
    return is_nan(key) ? 0u : bits >> 31 ? ~bits : bits | 0x80000000u;
  }

  // The K largest keys in descending order, ties to the lowest id: a thread counts who is ahead of its expert.
  __device__ void rank_experts(RouterRegion& sh, int experts) const {
#pragma unroll 1
    for (int e = thread_index(); e < experts; e += kThreads) {
      const uint32_t own = sh.key[e];
      int ahead = 0;
#pragma unroll 1
      for (int o = 0; o < experts; o += 4) {  // a multiple of eight
        const uint4 four = *reinterpret_cast<const uint4*>(sh.key + o);
        ahead += (four.x > own || (four.x == own && o < e)) + (four.y > own || (four.y == own && o + 1 < e)) +
                 (four.z > own || (four.z == own && o + 2 < e)) + (four.w > own || (four.w == own && o + 3 < e));
      }
      if (ahead < top_k()) sh.chosen[ahead] = e;
    }
  }

  // By one warp: the chosen experts' weights.
  __device__ void weigh(int l, int i, RouterRegion& sh) const {
    const int lane = thread_index() % 32;
    if (lane < top_k()) {  // ascending expert id
      int at = 0;
#pragma unroll 1
      for (int k = 0; k < top_k(); ++k) at += sh.chosen[k] < sh.chosen[lane];
      sh.order[at] = lane;
    }
    __syncwarp();
    float sum = 0.0f;
#pragma unroll 1
    for (int k = 0; k < top_k(); ++k) sum = sum + sh.probability[sh.chosen[sh.order[k]]];
    if (lane < top_k()) {
      const float weight = canonical(sh.probability[sh.chosen[lane]] / (sum + 1e-15f) * p_.routed_scaling);
      const int at = i * top_k() + lane;
      mine<int32_t>(w_.router_experts)[at] = sh.chosen[lane];
      mine<float>(w_.router_weights)[at] = weight;
      if (a_.results.tap_residuals && me() == a_.local[0]) {
        const int64_t tap = ((l - p_.layer_begin) * p_.rows + s_.rows.row[i]) * top_k() + lane;
        a_.results.tap_experts[tap] = sh.chosen[lane];
        a_.results.tap_weights[tap] = weight;
      }
    }
  }
};

}  // namespace muse
