// Router of a layer: logits, the choice, and the pooled rows as expert operands.
#pragma once

#include "ffi/decode/cuda/attention_steps.cuh"

namespace muse {

class RouterSteps : protected AttentionSteps {
 public:
  using AttentionSteps::AttentionSteps;
  using AttentionSteps::epoch;

 protected:
  // One warp per (row, expert of this rank): half a warp per segment, two segments at a time.
  __device__ void router_dots(int64_t l) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int own = static_cast<int>(p_.experts_rank());
    const int64_t length = p_.hidden / kSegments;
    for (int unit = place_.index * kWarps + warp; unit < n_ * own; unit += place_.size * kWarps) {
      const int i = unit / own, e = unit % own;
      const float* row = weights().router + p_.router(l) + e * p_.hidden;
      const uint16_t* h = mine<uint16_t>(w_.h) + i * p_.hidden;
      float s[kSegments];
      for (int pass = 0; pass < kSegments / 2; ++pass) {
        const int64_t base = (2 * pass + lane / 16) * length;
        float sum = 0.0f;
        for (int64_t k = base + lane % 16; k < base + length; k += kLanes)
          sum = fma1(from_bf16(h[permuted(k)]), row[k], sum);
        sum = fold_warp(sum);
        s[2 * pass] = __shfl_sync(~0u, sum, 0);
        s[2 * pass + 1] = __shfl_sync(~0u, sum, 16);
      }
      if (lane < kRanks)
        store_slot(slots(lane, w_.logits, me_, kMaxRows * own) + i * own + e, bit_cast<uint32_t>(tree8(s)),
                   place_.epoch);
    }
  }

  // Every rank routes every row for itself: choice, weights, normed pooled row as expert operand.
  __device__ bool route_rows(int64_t l) {
    const int64_t own = p_.experts_rank(), half = p_.moe_columns() / 2;
    bool alive = true;
    for (int i = place_.index; i < n_; i += place_.size) {
      __syncthreads();
      for (int e = threadIdx.x; e < p_.experts; e += kThreads) {
        const int source = static_cast<int>(e / own);
        const float dot =
            bit_cast<float>(wait_slot(place_, slots(me_, w_.logits, source, kMaxRows * own) + i * own + e % own,
                                      place_.epoch, Phase::kRouter, source, alive));
        const float probability = sigmoid(dot * p_.router_multiplier);
        s_.router.probability[e] = probability;
        s_.router.keys[e] = probability + a_.shared.router_bias[l * p_.experts + e];
      }
      for (int64_t c = threadIdx.x; c < p_.moe_hidden / 2; c += kThreads) {
        const int source = static_cast<int>(c / half);
        const uint32_t word = wait_slot(place_, slots(me_, w_.pooled, source, kMaxRows * half) + i * half + c % half,
                                        place_.epoch, Phase::kRouter, source, alive);
        s_.row[2 * c] = from_bf16(static_cast<uint16_t>(word));
        s_.row[2 * c + 1] = from_bf16(static_cast<uint16_t>(word >> 16));
      }
      if (!__syncthreads_and(alive)) return false;
      if (threadIdx.x < 32) choose(l, i);
      const uint16_t* g = a_.shared.moe_gains + 2 * l * p_.moe_hidden;
      const float r = inverse_rms(block_sumsq(p_.moe_hidden, s_.row, s_.partial), p_.moe_hidden, p_.eps);
      for (int64_t b = threadIdx.x; b < p_.moe_hidden / 16; b += kThreads) {
        uint16_t x[16];
        for (int k = 0; k < 16; ++k) x[k] = to_bf16((s_.row[16 * b + k] * r) * from_bf16(g[16 * b + k]));
        store_expert_block(l, x, 0, mine<uint16_t>(w_.x) + i * p_.moe_hidden + 16 * b,
                           mine<float>(w_.x_scales) + i * (p_.moe_hidden / 16) + b);
      }
    }
    return true;
  }

  // A block of 16 bf16 values as expert operand: bf16, or quantised and expanded to fp16 code values with its scale.
  __device__ void store_expert_block(int64_t l, const uint16_t (&x)[16], int gemm, uint16_t* out, float* scale) const {
    if (!p_.kind[l].nvfp4 || !p_.quantize_activations) {
      for (int k = 0; k < 16; ++k) out[permuted(k)] = x[k];
      return;
    }
    uint8_t codes[16];
    const uint8_t sf = quantize_block(x, a_.shared.input_scales[2 * l + gemm], codes);
    store_codes(codes, sf, out, scale);
  }

  __device__ static void store_codes(const uint8_t (&codes)[16], uint8_t sf, uint16_t* out, float* scale) {
    for (int k = 0; k < 16; ++k) {
      // e2m1 -> fp16: exponent bias 1 -> 15, so 14 more; 0.5 is e2m1's subnormal.
      const uint32_t magnitude = codes[k] & 7u;
      const uint32_t half = magnitude == 0 ? 0u : magnitude == 1 ? 0x3800u : (magnitude << 9) + (14u << 10);
      out[permuted(k)] = static_cast<uint16_t>(half | (codes[k] & 8u) << 12);
    }
    *scale = from_e4m3(sf) * kCodeScale;
  }

  // The K largest keys by one warp, as route_row of ffi/ops/router/row.h.
  __device__ void choose(int64_t l, int i) {
    const int lane = threadIdx.x, k_count = static_cast<int>(p_.top_k), experts = static_cast<int>(p_.experts);
    const auto better = [](float a, int a_id, float b, int b_id) {  // is (a, a_id) ahead of (b, b_id)?
      if (b_id < 0) return a_id >= 0;
      if (a_id < 0) return false;
      if (is_nan(a) || is_nan(b)) return is_nan(a) == is_nan(b) ? a_id < b_id : is_nan(b);
      return a != b ? a > b : a_id < b_id;
    };
    uint32_t taken = 0;  // bit e / 32 of this lane's experts
    for (int slot = 0; slot < k_count; ++slot) {
      float best = 0.0f;
      int id = -1;
      for (int e = lane; e < experts; e += 32)
        if (!(taken >> (e / 32) & 1u) && better(s_.router.keys[e], e, best, id)) best = s_.router.keys[e], id = e;
      for (int step = 16; step; step /= 2) {
        const float other = __shfl_xor_sync(~0u, best, step);
        const int other_id = __shfl_xor_sync(~0u, id, step);
        if (better(other, other_id, best, id)) best = other, id = other_id;
      }
      if (id % 32 == lane) taken |= 1u << (id / 32);
      if (lane == 0) s_.router.chosen[slot] = id;
    }
    __syncwarp();
    if (lane == 0) {
      int32_t* order = s_.router.order;
      const int32_t* chosen = s_.router.chosen;
      for (int k = 0; k < k_count; ++k) {
        int at = k;
        for (; at > 0 && chosen[order[at - 1]] > chosen[k]; --at) order[at] = order[at - 1];
        order[at] = k;
      }
      float sum = 0.0f;
      for (int k = 0; k < k_count; ++k) sum = sum + s_.router.probability[chosen[order[k]]];
      for (int k = 0; k < k_count; ++k) {
        const float weight = canonical(s_.router.probability[chosen[k]] / (sum + 1e-15f) * p_.routed_scaling);
        const int64_t at = int64_t{i} * k_count + k;
        mine<int32_t>(w_.router_experts)[at] = chosen[k];
        mine<float>(w_.router_weights)[at] = weight;
        if (a_.results.tap_residuals && me_ == a_.local[0]) {
          const int64_t tap = ((l - p_.layer_begin) * p_.rows + s_.rows.row[i]) * k_count + k;
          a_.results.tap_experts[tap] = chosen[k];
          a_.results.tap_weights[tap] = weight;
        }
      }
    }
  }
};

}  // namespace muse
