// Router of a layer: logits, the choice, and the pooled rows as expert operands.
#pragma once

#include <cuda_fp16.h>

#include "ffi/decode/cuda/attention_steps.cuh"

namespace muse {

class RouterSteps : protected AttentionSteps {
 public:
  using AttentionSteps::AttentionSteps;

 protected:
  // pre_expert_proj and the router share their operand. Router sums travel as eight segment sums each, which spares the
  // rank a meeting of its blocks; the pooled rows' would be too many, so the last of a row group's eight tasks adds them.
  __device__ void pool(int64_t l) {
    float* sums = mine<float>(w_.segment_sums);
    dense(
        pre_expert_job(p_, weights(), l), mine<uint16_t>(w_.h), p_.hidden,
        [&](int group, int segment, int i0, const Accumulators& acc) {
          store_sums(sums, kMaxRows, p_.moe_columns(), group, segment, i0, acc);
          push_pooled(sums, group, i0);
        },
        [&](int i0, Range segments) { router_dots(l, i0, segments); });
  }

  __device__ void push_pooled(const float* sums, int group, int i0) {
    const int lane = thread_index() % 32;
    uint32_t* counter = mine<uint32_t>(w_.group_counts) + i0 / kPassRows * (p_.moe_columns() / 16) + group;
    uint32_t arrived = 0;
    __threadfence();
    __syncwarp();
    if (lane == 0) arrived = atomicAdd(counter, 1u);
    if (__shfl_sync(~0u, arrived, 0) != kSegments - 1) return;
    if (lane == 0) *counter = 0;  // for the next layer, which lies behind barriers
    __threadfence();
    const int64_t half = p_.moe_columns() / 2;
    for (int at = lane; at < min(kPassRows, rows() - i0) * 8; at += 32) {
      const int i = i0 + at / 8;
      const int64_t column = group * 16 + at % 8 * 2;
      float s[2][kSegments];
#pragma unroll
      for (int r = 0; r < kSegments; ++r) {
        const float2 two =
            __ldcg(reinterpret_cast<const float2*>(sums + (r * kMaxRows + i) * p_.moe_columns() + column));
        s[0][r] = two.x;
        s[1][r] = two.y;
      }
      push_all(w_.pooled, kMaxRows * half, i * half + column / 2,
               pack(to_bf16(tree8(s[0])), to_bf16(tree8(s[1]))));
    }
  }

  // Segment sums of this block's run of (segment, expert of this rank) for one pass of rows: half a warp per row.
  __device__ void router_dots(int64_t l, int i0, Range segments) {
    const int warp = thread_index() / 32, lane = thread_index() % 32, j = lane % 16;
    const int own = static_cast<int>(p_.experts_rank()), count = min(kPassRows, rows() - i0), pairs = (count + 1) / 2;
    const Range range = part(int64_t{own} * kSegments, place_.index, place_.size);
    const int64_t length = p_.hidden / kSegments;
    for (int unit = warp; unit < (range.end - range.begin) * pairs; unit += kWarps) {
      const int task = range.begin + unit / pairs, segment = task / own, e = task % own;
      const int i = min(unit % pairs * 2 + lane / 16, count - 1);
      const float* row = weights().router + p_.router(l) + e * p_.hidden + segment * length + j;
      const uint16_t* h = region<uint16_t>() + column_tile_at(i, (segment - segments.begin) * length + j, 0);
      float sum = 0.0f;
#pragma unroll 8
      for (int b = 0; b < static_cast<int>(length) / 16; ++b)
        sum = fma1(from_bf16(h[b * kTile]), __ldg(row + b * 16), sum);
      sum = fold_warp(sum);
      // The eight lanes of each half store for eight ranks.
      if (j < kRanks)
        store_slot(slots_to(j, w_.logits, int64_t{kMaxRows} * own * kSegments) +
                       (int64_t{i0 + i} * own + e) * kSegments + segment,
                   bit_cast<uint32_t>(sum), place_.epoch);
    }
  }

  struct RouterRegion {
    float keys[1024], probability[1024];
    int32_t chosen[kMaxTopK], order[kMaxTopK];
    float row[];  // the pooled row
  };

  // Every rank routes every row for itself: choice, weights, normed pooled row as expert operand.
  __device__ bool route_rows(int64_t l) {
    const int64_t own = p_.experts_rank(), half = p_.moe_columns() / 2;
    RouterRegion& sh = *region<RouterRegion>();
    for (int i = place_.index; i < rows(); i += place_.size) {
      sync_block();
      for (int e = thread_index(); e < p_.experts; e += kThreads) {
        const int source = static_cast<int>(e / own);
        uint32_t word[kSegments] = {};
        wait(
            Phase::kRouter,
            [&](int s) {
              return slots_from(source, w_.logits, kMaxRows * own * kSegments) + (i * own + e % own) * kSegments + s;
            },
            [&](int) { return source; }, word);
        float s[kSegments];
        for (int r = 0; r < kSegments; ++r) s[r] = bit_cast<float>(word[r]);
        const float probability = sigmoid(tree8(s) * p_.router_multiplier);
        sh.probability[e] = probability;
        sh.keys[e] = probability + a_.shared.router_bias[l * p_.experts + e];
      }
      constexpr int kWords = 4;
      for (int64_t c0 = thread_index(); c0 < p_.moe_hidden / 2; c0 += kWords * kThreads) {
        const auto at = [&](int e) { return min(c0 + e * kThreads, p_.moe_hidden / 2 - 1); };
        uint32_t word[kWords] = {};
        wait(
            Phase::kRouter,
            [&](int e) {
              return slots_from(static_cast<int>(at(e) / half), w_.pooled, kMaxRows * half) + i * half + at(e) % half;
            },
            [&](int e) { return static_cast<int>(at(e) / half); }, word);
        for (int e = 0; e < kWords; ++e) {
          sh.row[2 * at(e)] = from_bf16(static_cast<uint16_t>(word[e]));
          sh.row[2 * at(e) + 1] = from_bf16(static_cast<uint16_t>(word[e] >> 16));
        }
      }
      if (!all_alive()) return false;
      if (thread_index() / 32 == kWarps - 1) choose(l, i, sh);  // a warp that the sum of squares leaves free
      const uint16_t* g = a_.shared.moe_gains + 2 * l * p_.moe_hidden;
      const float r = inverse_rms(block_sumsq(p_.moe_hidden, sh.row, s_.partial), p_.moe_hidden, p_.eps);
      uint16_t* out = mine<uint16_t>(w_.x) + i * expert_row(p_.moe_hidden);
      for (int64_t b = thread_index(); b < p_.moe_hidden / 16; b += kThreads) {
        uint16_t x[16];
        for (int k = 0; k < 16; ++k) x[k] = to_bf16((sh.row[16 * b + k] * r) * from_bf16(g[16 * b + k]));
        store_expert_block(l, x, 0, out, p_.moe_hidden, b);
      }
    }
    return true;
  }

  // Expert operands are rows of 16-bit numbers, each of eight segments padded to whole panels; a pair of 16-blocks lies
  // so that lane (g, t) reads the four registers of column g with one 16-byte load.
  __device__ int64_t expert_row(int64_t k) const { return kSegments * p_.panels(k) * kPanelBlocks * 16; }
  // Where lane t's four numbers of 16-block b stand in the row.
  __device__ int64_t expert_block(int64_t k, int64_t b, int t) const {
    const int64_t blocks = k / kSegments / 16, segment = b / blocks, own = b % blocks;
    return (segment * p_.panels(k) * kPanelBlocks + own / 2 * 2) * 16 + t * 8 + own % 2 * 4;
  }

  // A block of 16 bf16 values as expert operand: as it is, or quantised.
  __device__ void store_expert_block(int64_t l, const uint16_t (&x)[16], int gemm, uint16_t* out, int64_t k,
                                     int64_t b) const {
    if (p_.kind[l].nvfp4 && p_.quantize_activations) {
      uint8_t codes[16];
      const uint8_t sf = quantize_block(x, a_.shared.input_scales[2 * l + gemm], codes);
      store_codes(codes, sf, out, k, b);
    } else {
      store_operand(x, out, k, b);
    }
  }

  // Code times block scale has six significant bits: exact in fp16.
  __device__ void store_codes(const uint8_t (&codes)[16], uint8_t sf, uint16_t* out, int64_t k, int64_t b) const {
    const float scale = from_e4m3(sf);
    uint16_t x[16];
    for (int i = 0; i < 16; ++i) x[i] = __half_as_ushort(__float2half_rn(from_e2m1(codes[i]) * scale));
    store_operand(x, out, k, b);
  }

  __device__ void store_operand(const uint16_t (&x)[16], uint16_t* out, int64_t k, int64_t b) const {
    for (int t = 0; t < 4; ++t)
      *reinterpret_cast<uint2*>(out + expert_block(k, b, t)) =
          uint2{pack(x[2 * t], x[2 * t + 1]), pack(x[2 * t + 8], x[2 * t + 9])};
  }

  // The K largest keys by one warp, as route_row of ffi/ops/router/row.h.
  __device__ void choose(int64_t l, int i, RouterRegion& sh) {
    const int lane = thread_index() % 32, k_count = static_cast<int>(p_.top_k), experts = static_cast<int>(p_.experts);
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
        if (!(taken >> (e / 32) & 1u) && better(sh.keys[e], e, best, id)) best = sh.keys[e], id = e;
      for (int step = 16; step; step /= 2) {
        const float other = __shfl_xor_sync(~0u, best, step);
        const int other_id = __shfl_xor_sync(~0u, id, step);
        if (better(other, other_id, best, id)) best = other, id = other_id;
      }
      if (id % 32 == lane) taken |= 1u << (id / 32);
      if (lane == 0) sh.chosen[slot] = id;
    }
    __syncwarp();
    if (lane < k_count) {  // ascending expert id
      int at = 0;
      for (int k = 0; k < k_count; ++k) at += sh.chosen[k] < sh.chosen[lane];
      sh.order[at] = lane;
    }
    __syncwarp();
    float sum = 0.0f;
    for (int k = 0; k < k_count; ++k) sum = sum + sh.probability[sh.chosen[sh.order[k]]];
    if (lane < k_count) {
      const float weight = canonical(sh.probability[sh.chosen[lane]] / (sum + 1e-15f) * p_.routed_scaling);
      const int64_t at = int64_t{i} * k_count + lane;
      mine<int32_t>(w_.router_experts)[at] = sh.chosen[lane];
      mine<float>(w_.router_weights)[at] = weight;
      if (a_.results.tap_residuals && me() == a_.local[0]) {
        const int64_t tap = ((l - p_.layer_begin) * p_.rows + s_.rows.row[i]) * k_count + lane;
        a_.results.tap_experts[tap] = sh.chosen[lane];
        a_.results.tap_weights[tap] = weight;
      }
    }
  }
};

}  // namespace muse
