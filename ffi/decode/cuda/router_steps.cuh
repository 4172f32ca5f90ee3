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
    uint32_t best_key[kWarps * kMaxTopK];  // of each warp's share
    int32_t best[kWarps * kMaxTopK], chosen[kMaxTopK];
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
      const int source = static_cast<uint32_t>(e) / static_cast<uint32_t>(own);
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
    fetch_pooled(unit / kOperandParts);
    if (!all_alive()) return false;
    write_operand(unit);
    return true;
  }

  // Pairs of columns -> the region, as floats.
  __device__ void fetch_pooled(int i) {
    const int half = static_cast<int>(p_.moe_columns()) / 2;
#pragma unroll 1
    for (int c = 2 * thread_index(); c < half; c += 2 * kThreads)
      wait_pairs(place_, Phase::kRouter, slots_from(0, w_.pooled, kMaxRows * half) + i * half + c, kMaxRows * half,
                 kRanks, -1, region<uint32_t>() + 2 * c, 2 * half, 2);
    // What the thread itself has brought, two pairs at once.
#pragma unroll 1
    for (int c = 2 * thread_index(); c < half; c += 2 * kThreads) {
#pragma unroll 4
      for (int r = 0; r < kRanks; ++r) {
        float4* four = reinterpret_cast<float4*>(region<float2>() + r * half + c);
        const uint4 two = *reinterpret_cast<const uint4*>(four);
        *four = {low_bf16(two.x), high_bf16(two.x), low_bf16(two.z), high_bf16(two.z)};
      }
    }
  }

  // Four threads per 16-block, four numbers each, those of their words: as codes and their scale, or as they are.
  __device__ __forceinline__ void write_operand(int unit) {
    const float r = rms_factor(block_sumsq(moe_hidden(), region<float>(), s_.partial), moe_hidden(), p_.eps);
    const int l = layer();
    const int words = segment_words(), in_segment = words / static_cast<int>(kPieceWords), blocks = 2 * in_segment;
    static_assert(kSegments == 2 * kOperandParts, "a part is two segments");
    const uint32_t* gains = reinterpret_cast<const uint32_t*>(global(a_.shared.moe_gains) + 2 * l * moe_hidden());
#pragma unroll 1
    for (int first = 0; first < blocks; first += kThreads / 4) {
      const int at = first + thread_index() / 4, t = thread_index() % 4,
                of_part = min(at, blocks - 1),  // a warp stays together
          b = unit % kOperandParts * blocks + of_part;
      uint32_t x[2];  // numbers 2 t and 2 t + 1, 2 t + 8 and 2 t + 9
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 v = region<float2>()[8 * b + 4 * h + t];
        const uint32_t gain = __ldg(gains + 8 * b + 4 * h + t);
        x[h] = pack(to_bf16((v.x * r) * low_bf16(gain)), to_bf16((v.y * r) * high_bf16(gain)));
      }
      const bool quantized = p_.kind[l].nvfp4 && p_.quantize_activations;
      if (quantized) x[0] = quantize_quarter(x, a_.shared.input_scales[2 * l]);
      if (at >= blocks) continue;
      const bool second = at >= in_segment;
      const int own = at - second * in_segment;
      uint64_t* out = mine<uint64_t>(w_.x) + (2 * unit + second) * words + 2 * t;
      if (quantized)
        store_slot(out + own / 2 * static_cast<int>(kPieceWords) + own % 2, x[0], place_.epoch);
      else
        ptx::store_relaxed_gpu_v2(out + own * static_cast<int>(kPieceWords), slot_word(x[0], place_.epoch),
                                  slot_word(x[1], place_.epoch));
    }
  }

  // The word of four threads' sixteen numbers that is the caller's: its codes and the block's scale.
  __device__ __forceinline__ static uint32_t quantize_quarter(const uint32_t (&x)[2], float input_scale) {
    // Of magnitudes as unsigned numbers the largest is not finite where one is not.
    uint32_t amax = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) amax = max(amax, max(x[h] << 16 & 0x7FFF0000u, x[h] & 0x7FFF0000u));
#pragma unroll
    for (int step = 1; step < 4; step *= 2) amax = max(amax, __shfl_xor_sync(~0u, amax, step));
    const uint8_t sf = block_scale(bit_cast<float>(amax), amax < 0x7F800000u, input_scale);
    uint32_t word = scale_bits(sf);
    if (sf == 0 || sf == kNan8) return word;  // and all codes zero
    const float divisor = from_e4m3(sf) * input_scale;
    uint32_t now = x[0], next = x[1];
#pragma unroll 1  // one copy of the code; what is left of both words moves down
    for (int e = 0; e < 4; ++e) {
      word |= code_bits(code_of(low_bf16(now), divisor), e % 2 + 8 * (e / 2));
      now = now >> 16 | next << 16;
      next >>= 16;
    }
    return word;
  }

  // Keys as unsigned numbers of the same order, at least 1; NaN below all others.
  __device__ static uint32_t sortable(float key) {
    const uint32_t bits = bit_cast<uint32_t>(key == 0.0f ? 0.0f : key);  // -0 and +0 are equal
    return is_nan(key) ? 1u : bits >> 31 ? ~bits : bits | 0x80000000u;
  }

  // How many of the keys [begin, end) are ahead of the one at `at`: the larger ones, and before it those that are
  // equal, which a comparison with the next lower number says (the lowest is NaN's, 1). Ranges of whole quads; up to
  // three of them behind the range are read too.
  __device__ static __noinline__ int count_ahead(const uint32_t* keys, int begin, int end, int at) {
    const uint32_t own = keys[at];
    const int group = at & ~3;
    int ahead = 0;
#pragma unroll
    for (int e = 0; e < 3; ++e) ahead += group + e < at && keys[group + e] == own;
#pragma unroll 1
    for (int first = begin; first < end; first += 16) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int o = first + 4 * e;
        const uint4 four = *reinterpret_cast<const uint4*>(keys + o);
        const uint32_t limit = o >= end ? ~0u : own - (o < group);
        ahead += ((four.x > limit) + (four.y > limit)) + ((four.z > limit) + (four.w > limit));
      }
    }
    return ahead;
  }

  // The K largest keys in descending order, ties to the lowest id: first each warp's in its share, then those of all.
  __device__ void rank_experts(RouterRegion& sh, int experts) const {
    const int warp = thread_index() / 32, lane = thread_index() % 32, k_count = top_k();
    const int share = static_cast<int>((experts + 4u * kWarps - 1) / (4 * kWarps) * 4),
              begin = min(warp * share, experts), end = min(begin + share, experts);
    if (lane < k_count && begin + lane >= end) sh.best_key[warp * k_count + lane] = 0;  // fewer than K
#pragma unroll 1
    for (int e = begin + lane; e < end; e += 32) {
      const int ahead = count_ahead(sh.key, begin, end, e), at = warp * k_count + ahead;
      if (ahead < k_count) sh.best_key[at] = sh.key[e], sh.best[at] = e;
    }
    sync_block();
    const int c = thread_index(), candidates = kWarps * k_count;
    static_assert(kWarps * kMaxTopK <= kThreads, "a thread each");
    if (c >= candidates || sh.best_key[c] == 0) return;
    if (const int ahead = count_ahead(sh.best_key, 0, candidates, c); ahead < k_count) sh.chosen[ahead] = sh.best[c];
  }

  // By one warp: the chosen experts' weights.
  __device__ void weigh(int l, int i, RouterRegion& sh) const {
    const int lane = thread_index() % 32, k_count = top_k();
    const bool counts = lane < k_count;
    // Whole quads: behind the chosen ones some that are behind all others and weigh nothing.
    if (!counts && lane < kMaxTopK) sh.chosen[lane] = INT32_MAX, sh.ordered[lane] = 0.0f;
    __syncwarp();
    const int own = sh.chosen[counts ? lane : 0];
    const float probability = sh.probability[own];
    if (counts) {  // ascending expert id
      int at = 0;
#pragma unroll 1
      for (int k = 0; k < k_count; k += 4) {
        const int4 four = *reinterpret_cast<const int4*>(sh.chosen + k);
        at += ((four.x < own) + (four.y < own)) + ((four.z < own) + (four.w < own));
      }
      sh.ordered[at] = probability;
    }
    __syncwarp();
    float sum = 0.0f;
#pragma unroll 1
    for (int k = 0; k < k_count; k += 4) {
      const float4 four = *reinterpret_cast<const float4*>(sh.ordered + k);
      sum = (((sum + four.x) + four.y) + four.z) + four.w;
    }
    if (counts) {
      const float weight = canonical(probability / (sum + 1e-15f) * p_.routed_scaling);
      const int at = i * k_count + lane;
      store_slot(mine<uint64_t>(w_.router_experts) + at, static_cast<uint32_t>(own), place_.epoch);
      store_slot(mine<uint64_t>(w_.router_weights) + at, bit_cast<uint32_t>(weight), place_.epoch);
      if (a_.results.tap_residuals && me() == a_.local[0]) {
        const int tap =
            ((l - static_cast<int>(p_.layer_begin)) * static_cast<int>(p_.rows) + s_.rows.row[i]) * k_count + lane;
        a_.results.tap_experts[tap] = own;
        a_.results.tap_weights[tap] = weight;
      }
    }
  }
};

}  // namespace muse
