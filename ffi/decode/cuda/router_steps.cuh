// Router of a layer: the choice of experts, and the pooled rows as expert operands.
#pragma once

#include "ffi/decode/cuda/attention_steps.cuh"
#include "ffi/decode/cuda/expert_chain.cuh"

namespace muse {

// The quantiser's two steps, one piece of code for both operands.
inline __device__ __noinline__ uint8_t block_scale(float amax, bool finite, float input_scale) {
  return activation_scale(amax, finite, input_scale);
}
inline __device__ __noinline__ uint32_t code_of(float x, float divisor) { return to_e2m1_sat(x / divisor); }

class RouterSteps : public AttentionSteps {
 public:
  using AttentionSteps::AttentionSteps;

  // Every rank routes every row for itself. A block chooses a row's experts or makes a part of its expert operand.
  __device__ bool route_rows() {
#pragma unroll 1
    for (int unit = first_unit(4); unit < (1 + kOperandParts) * rows(); unit += blocks()) {
      sync_block();
      if (unit < rows()) {
        if (!run_phase<&RouterSteps::choose_experts>(unit)) return false;
      } else {
        if (!run_phase<&RouterSteps::make_operand>(unit - rows())) return false;
      }
    }
    return true;
  }

 protected:
  struct RouterRegion {
    uint32_t key[1024];
    float probability[1024];
    int32_t chosen[kMaxTopK];
    float ordered[kMaxTopK];  // their probabilities by ascending id
  };

  // Slot words of a segment of an expert operand.
  __device__ int segment_words() const { return moe_hidden() / kSegments / 16 * static_cast<int>(kPieceWords); }

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

  static constexpr int kOperandParts = 4;

  // A part of the pooled row, normed, as expert operand. Each block norms the whole row for itself.
  __device__ bool make_operand(int unit) {
    const int i = unit / kOperandParts;
    fetch_pooled(i);
    if (!all_alive()) return false;
    const float sum = block_sumsq(moe_hidden(), region<float>(), s_.partial);
    run_phase<&RouterSteps::write_operand>(i, unit % kOperandParts, rms_factor(sum, moe_hidden(), p_.eps));
    return true;
  }

  // Pairs of columns -> the region, as floats.
  __device__ void fetch_pooled(int i) {
    const int half = static_cast<int>(p_.moe_columns()) / 2, pairs = kRanks * half;
    float2* row = region<float2>();
    uint32_t* two = region<uint32_t>();
    const uint64_t* pooled = slots_from(0, w_.pooled, kMaxRows * half) + i * half;
#pragma unroll 1
    for (int c = 2 * thread_index(); c < half; c += 2 * kThreads) {
      wait_pairs(place_, Phase::kRouter, pooled + c, kMaxRows * half, kRanks, -1, two + 2 * c, 2 * half, 2);
#pragma unroll 4
      for (int at = c; at < pairs; at += half)
#pragma unroll
        for (int e = at; e < at + 2; ++e) row[e] = {low_bf16(two[2 * e]), high_bf16(two[2 * e])};
    }
  }

  // Eight threads per 16-block, two numbers each: as codes and their scale, or as they are.
  __device__ void write_operand(int i, int of_parts, float r) {
    const int l = layer(), k = thread_index() % 8;
    const Range blocks = part(moe_hidden() / 16, of_parts, kOperandParts);
    const int words = segment_words(), in_segment = words / static_cast<int>(kPieceWords);
    const uint32_t* gains = reinterpret_cast<const uint32_t*>(global(a_.shared.moe_gains) + 2 * l * moe_hidden());
    uint64_t* out = mine<uint64_t>(w_.x) + i * kSegments * words;
    const bool quantized = p_.kind[l].nvfp4 && p_.quantize_activations;
    const float input_scale = a_.shared.input_scales[2 * l];
#pragma unroll 1
    for (int first = blocks.begin; first < blocks.end; first += kThreads / 8) {
      const int at = first + thread_index() / 8, b = min(at, blocks.end - 1);  // a warp stays together
      const float2 v = region<float2>()[8 * b + k];
      const uint32_t gain = __ldg(gains + 8 * b + k);
      const uint16_t x = to_bf16((v.x * r) * low_bf16(gain)), y = to_bf16((v.y * r) * high_bf16(gain));
      const int segment = b / in_segment, own = b - segment * in_segment;
      uint32_t word = pack(x, y);
      int place = own * static_cast<int>(kPieceWords) + k % 4 * 2 + k / 4;
      bool storing = at < blocks.end;
      if (quantized) {
        float amax = fmaxf(abs32(from_bf16(x)), abs32(from_bf16(y)));
#pragma unroll
        for (int step = 1; step < 8; step *= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, step));
        const uint32_t infinite = __ballot_sync(~0u, !bf16_finite(x) || !bf16_finite(y));
        const uint8_t sf = block_scale(amax, (infinite >> (thread_index() % 32 & ~7) & 0xFFu) == 0, input_scale);
        const bool zero = sf == 0 || sf == kNan8;
        const float divisor = from_e4m3(sf) * input_scale;
        const uint32_t low = zero ? 0u : code_of(from_bf16(x), divisor),
                       high = zero ? 0u : code_of(from_bf16(y), divisor);
        word = code_bits(low, 2 * k) | code_bits(high, 2 * k + 1);
        word |= __shfl_xor_sync(~0u, word, 4) | scale_bits(sf);
        place = own / 2 * static_cast<int>(kPieceWords) + k % 4 * 2 + own % 2;
        storing = storing && k < 4;
      }
      if (storing) store_slot(out + segment * words + place, word, place_.epoch);
    }
  }

  // Keys as unsigned numbers of the same order, at least 1; NaN below all others.
  __device__ static uint32_t sortable(float key) {
    const uint32_t bits = bit_cast<uint32_t>(key == 0.0f ? 0.0f : key);  // -0 and +0 are equal
    return is_nan(key) ? 1u : bits >> 31 ? ~bits : bits | 0x80000000u;
  }

  // The K largest keys in descending order, ties to the lowest id: a thread counts who is ahead of its expert. Of the
  // experts before it those with an equal key are too, which a comparison with the next lower number says (the lowest
  // is NaN's, 1).
  __device__ void rank_experts(RouterRegion& sh, int experts) const {
#pragma unroll 1
    for (int e = thread_index(); e < experts; e += kThreads) {
      const uint32_t own = sh.key[e];
      int ahead = 0;
      const auto count = [&](int begin, int end, uint32_t limit) {
#pragma unroll 4
        for (int o = begin; o < end; o += 4) {
          const uint4 four = *reinterpret_cast<const uint4*>(sh.key + o);
          ahead += (four.x > limit) + (four.y > limit) + (four.z > limit) + (four.w > limit);
        }
      };
      const int group = e & ~3;
      count(0, group, own - 1);
#pragma unroll 1
      for (int o = group; o < group + 4; ++o) ahead += sh.key[o] > own - (o < e);
      count(group + 4, experts, own);  // experts are a multiple of eight
      if (ahead < top_k()) sh.chosen[ahead] = e;
    }
  }

  // By one warp: the chosen experts' weights.
  __device__ void weigh(int l, int i, RouterRegion& sh) const {
    const int lane = thread_index() % 32;
    const int own = lane < top_k() ? sh.chosen[lane] : 0;
    const float probability = sh.probability[own];
    if (lane < top_k()) {  // ascending expert id
      int at = 0;
#pragma unroll 4
      for (int k = 0; k < top_k(); ++k) at += sh.chosen[k] < own;
      sh.ordered[at] = probability;
    }
    __syncwarp();
    float sum = 0.0f;
#pragma unroll 4
    for (int k = 0; k < top_k(); ++k) sum = sum + sh.ordered[k];
    if (lane < top_k()) {
      const float weight = canonical(probability / (sum + 1e-15f) * p_.routed_scaling);
      const int at = i * top_k() + lane;
      store_slot(mine<uint64_t>(w_.router_experts) + at, static_cast<uint32_t>(sh.chosen[lane]), place_.epoch);
      store_slot(mine<uint64_t>(w_.router_weights) + at, bit_cast<uint32_t>(weight), place_.epoch);
      if (a_.results.tap_residuals && me() == a_.local[0]) {
        const int64_t tap = ((l - p_.layer_begin) * p_.rows + s_.rows.row[i]) * top_k() + lane;
        a_.results.tap_experts[tap] = sh.chosen[lane];
        a_.results.tap_weights[tap] = weight;
      }
    }
  }
};

}  // namespace muse
