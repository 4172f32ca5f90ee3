// The fused decode step on a GPU: one launch for all layers. The blocks of a device are shared out among its ranks; a
// rank's blocks meet at barriers, ranks meet through slots (sync.cuh). The arithmetic is ffi/decode/cpu/layers.cc's,
// bit for bit.
#include <cuda_runtime.h>

#include <algorithm>

#include "ffi/decode/cuda/attention.cuh"
#include "ffi/decode/cuda/column_parallel.cuh"
#include "ffi/decode/cuda/layers.h"

namespace muse {
namespace {

struct Shared {
  DeviceRows rows;
  float partial[kSegments];
  union {
    SegmentSums sums[2];
    AttentionShared attention;
    struct {
      float keys[1024], probability[1024];
      int32_t chosen[kMaxTopK], order[kMaxTopK];
      float weight[kMaxTopK];
    } router;
    struct {
      uint16_t m[kColumns][16];
      SegmentSums sums[2];
    } experts;
    struct {
      float rho[kMaxTopK];
      int32_t expert[kMaxTopK], order[kMaxTopK];
      float weight[kMaxTopK];
    } combine;
  };
  int32_t pairs[kMaxPairs];   // (row, slot) pairs ordered by expert
  int16_t expert[kMaxPairs];  // the experts in use, ascending
  int16_t first[kMaxPairs + 1];
  int32_t used;
  float row[];  // scratch (layers_shared_bytes): a row's stream and branch, a pooled row, the chosen experts
};

// One block's run through the layers.
class Step {
 public:
  __device__ Step(const LayersArgs& args, Shared& shared, Place place)
      : a_(args), p_(args.plan), w_(args.offsets), s_(shared), place_(place), me_(place.rank) {}

  __device__ bool run() {
    resolve_rows(p_, a_.shared, s_.rows);
    if (s_.rows.bad) {
      if (place_.index == 0 && threadIdx.x == 0) give_up(place_, kBadRows, Phase::kEmbed, s_.rows.bad - 1);
      return false;
    }
    n_ = s_.rows.count;
    if (n_ == 0) return true;
    if (p_.layer_begin == 0) {
      if (!embed()) return false;
    } else {
      for (int i = place_.index; i < n_; i += place_.size)
        for (int64_t c = threadIdx.x; c < p_.hidden; c += kThreads)
          stream(i)[c] = a_.shared.stream[s_.rows.row[i] * p_.hidden + c];
    }
    if (p_.layer_begin < p_.layer_end) first_norm();
    for (int64_t l = p_.layer_begin; l < p_.layer_end; ++l) {
      place_.layer = static_cast<uint32_t>(l);
      ++place_.epoch;
      if (!rank_barrier(place_, Phase::kAttention)) return false;  // h is written
      if (!attention(l) || !moe(l)) return false;
    }
    store_stream();
    return rank_barrier(place_, Phase::kEnd);
  }

  __device__ uint32_t epoch() const { return place_.epoch; }

 private:
  template <typename T>
  __device__ T* mine(int64_t offset) const {
    return reinterpret_cast<T*>(a_.workspace[me_] + offset);
  }
  template <typename T>
  __device__ T* of(int rank, int64_t offset) const {
    return reinterpret_cast<T*>(a_.workspace[rank] + offset);
  }
  __device__ float* stream(int i) const { return mine<float>(w_.stream) + i * p_.hidden; }
  __device__ const RankPointers& weights() const { return a_.rank[me_]; }

  // Slot words of `what` that source rank `source` fills at rank `rank`; `per_source` words each.
  __device__ uint64_t* slots(int rank, int64_t offset, int source, int64_t per_source) const {
    return of<uint64_t>(rank, offset) + source * per_source;
  }
  __device__ void push_all(int64_t offset, int64_t per_source, int64_t word, uint32_t data) const {
    for (int r = 0; r < kRanks; ++r) store_slot(slots(r, offset, me_, per_source) + word, data, place_.epoch);
  }

  // --- rows: one block per row -------------------------------------------------------------------------------------

  // The owner of a token's embedding row norms it and gives it to everybody through the branch slots.
  __device__ bool embed() {
    ++place_.epoch;
    const int64_t half = p_.hidden / kRanks / 2, per_source = kMaxRows * half;
    for (int i = place_.index; i < n_; i += place_.size) {
      const int32_t token = s_.rows.token[i];
      if (token / p_.vocab_rank() != me_) continue;
      const uint16_t* row = weights().embed + token % p_.vocab_rank() * p_.hidden;
      for (int64_t c = threadIdx.x; c < p_.hidden; c += kThreads) s_.row[c] = from_bf16(row[c]);
      __syncthreads();
      const float r = inverse_rms(block_sumsq(p_.hidden, s_.row, s_.partial), p_.hidden, p_.eps);
      for (int64_t c = threadIdx.x; c < p_.hidden / 2; c += kThreads) {
        const uint32_t word = pack(to_bf16(s_.row[2 * c] * r), to_bf16(s_.row[2 * c + 1] * r));
        for (int to = 0; to < kRanks; ++to)
          store_slot(slots(to, w_.branch[0], static_cast<int>(c / half), per_source) + i * half + c % half, word,
                     place_.epoch);
      }
      __syncthreads();
    }
    bool alive = true;
    for (int i = place_.index; i < n_; i += place_.size)
      for (int64_t c = threadIdx.x; c < p_.hidden / 2; c += kThreads) {
        const uint64_t* slot = slots(me_, w_.branch[0], static_cast<int>(c / half), per_source) + i * half + c % half;
        const uint32_t word =
            wait_slot(place_, slot, place_.epoch, Phase::kEmbed, s_.rows.token[i] / p_.vocab_rank(), alive);
        stream(i)[2 * c] = canonical(from_bf16(static_cast<uint16_t>(word)));
        stream(i)[2 * c + 1] = canonical(from_bf16(static_cast<uint16_t>(word >> 16)));
      }
    return __syncthreads_and(alive);
  }

  // h of the first layer; later ones are made where the stream is updated.
  __device__ void first_norm() {
    for (int i = place_.index; i < n_; i += place_.size) {
      __syncthreads();
      for (int64_t c = threadIdx.x; c < p_.hidden; c += kThreads) s_.row[c] = stream(i)[c];
      __syncthreads();
      norm_to_h(i, gain(p_.layer_begin, 0));
    }
  }

  __device__ const uint16_t* gain(int64_t l, int which) const {
    return a_.shared.hidden_gains + (3 * l + which) * p_.hidden;
  }

  // s_.row[0 .. hidden) -> the GEMM operand h of row i.
  __device__ void norm_to_h(int i, const uint16_t* g) {
    const float r = inverse_rms(block_sumsq(p_.hidden, s_.row, s_.partial), p_.hidden, p_.eps);
    uint16_t* h = mine<uint16_t>(w_.h) + i * p_.hidden;
    for (int64_t c = threadIdx.x; c < p_.hidden; c += kThreads)
      h[permuted(c)] = to_bf16((s_.row[c] * r) * from_bf16(g[c]));
  }

  // Adds the branch that the row-parallel exchange `which` brought to the stream, and norms it for what follows.
  __device__ bool branch(int64_t l, int which) {
    const int64_t half = p_.hidden / kRanks / 2, per_source = kMaxRows * half;
    float* y = s_.row + p_.hidden;
    bool alive = true;
    for (int i = place_.index; i < n_; i += place_.size) {
      __syncthreads();
      for (int64_t c = threadIdx.x; c < p_.hidden / 2; c += kThreads) {
        const int owner = static_cast<int>(c / half);
        const uint32_t word = wait_slot(place_, slots(me_, w_.branch[which], owner, per_source) + i * half + c % half,
                                        place_.epoch, Phase::kBranch, owner, alive);
        y[2 * c] = from_bf16(static_cast<uint16_t>(word));
        y[2 * c + 1] = from_bf16(static_cast<uint16_t>(word >> 16));
      }
      if (!__syncthreads_and(alive)) return false;
      if (which == 1)  // scale first
        for (int64_t c = threadIdx.x; c < p_.hidden; c += kThreads) y[c] = round_bf16(y[c] * from_bf16(gain(l, 2)[c]));
      __syncthreads();
      const float r = inverse_rms(block_sumsq(p_.hidden, y, s_.partial), p_.hidden, p_.post_eps);
      const float *alpha = a_.shared.gates + (4 * l + 2 * which) * p_.hidden, *beta = alpha + p_.hidden;
      for (int64_t c = threadIdx.x; c < p_.hidden; c += kThreads) {
        const float s = canonical(alpha[c] * stream(i)[c] + beta[c] * round_bf16(y[c] * r));
        stream(i)[c] = s_.row[c] = s;
        if (a_.results.tap_residuals && me_ == a_.local[0])
          a_.results.tap_residuals[((2 * (l - p_.layer_begin) + which) * p_.rows + s_.rows.row[i]) * p_.hidden + c] = s;
      }
      __syncthreads();
      if (which == 0)
        norm_to_h(i, gain(l, 1));
      else if (l + 1 < p_.layer_end)
        norm_to_h(i, gain(l + 1, 0));
    }
    return true;
  }

  __device__ void store_stream() {
    if (me_ != a_.local[0]) return;
    for (int i = place_.index; i < n_; i += place_.size)
      for (int64_t c = threadIdx.x; c < p_.hidden; c += kThreads)
        a_.results.stream[s_.rows.row[i] * p_.hidden + c] = stream(i)[c];
  }

  // --- GEMMs -------------------------------------------------------------------------------------------------------

  // Row-parallel bf16 GEMM: this rank's columns are one segment; its partial sums go to the owners of the output
  // columns, which add the eight in the contract's order and give everybody the rounded result.
  __device__ bool row_parallel(const uint16_t* tiles, const uint16_t* operand, int64_t width, int which, Phase phase) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int64_t blocks = width / 16, owned = p_.hidden / kRanks, per_source = kMaxRows * owned;
    for (int64_t group = place_.index * kWarps + warp; group < p_.hidden / 16; group += place_.size * kWarps)
      for (int c0 = 0; c0 < n_; c0 += kColumns) {
        Accumulators acc;
        clear(acc);
        chain_bf16(tiles + group * blocks * kTile, blocks, columns(operand, width, c0, n_, nullptr, 1), acc);
        for (int b = 0; b < 2; ++b)
          for (int j = 0; j < 4; ++j) {
            const int i = c0 + 8 * b + 2 * t + (j & 1);
            const int64_t column = group * 16 + g + 8 * (j >> 1);
            if (i >= n_) continue;
            uint64_t* slot = slots(static_cast<int>(column / owned), w_.partial[which], me_, per_source) + i * owned;
            store_slot(slot + column % owned, bit_cast<uint32_t>(acc[b][j]), place_.epoch);
          }
      }
    // As owner: columns me_ * owned ..., two per thread.
    const int64_t half = owned / 2;
    bool alive = true;
    for (int64_t at = place_.index * kThreads + threadIdx.x; at < n_ * half; at += int64_t{place_.size} * kThreads) {
      const int64_t i = at / half, c = at % half;
      uint16_t y[2];
      for (int e = 0; e < 2; ++e) {
        float s[kRanks];
        for (int r = 0; r < kRanks; ++r)
          s[r] = bit_cast<float>(wait_slot(place_, slots(me_, w_.partial[which], r, per_source) + i * owned + 2 * c + e,
                                           place_.epoch, phase, r, alive));
        y[e] = to_bf16(tree8(s));
      }
      if (!alive) break;
      push_all(w_.branch[which], kMaxRows * half, i * half + c, pack(y[0], y[1]));
    }
    return __syncthreads_and(alive);
  }

  // --- attention ---------------------------------------------------------------------------------------------------

  __device__ bool attention(int64_t l) {
    const int64_t q = p_.q_columns(), kv = p_.kv_columns();
    column_parallel(place_, n_, s_.sums[0], weights().qkvu + p_.qkvu(l), p_.qkvu_rows() / 16, mine<uint16_t>(w_.h),
                    p_.hidden, [&](int64_t group, int i, int c, float sum) {
                      int64_t column = group * 16 + c;
                      uint16_t* out;
                      if (column < q) {
                        out = mine<uint16_t>(w_.q) + i * q + column;
                      } else if ((column -= q) < kv) {
                        out = mine<uint16_t>(w_.k) + i * kv + column;
                      } else if ((column -= kv) < kv) {
                        out = mine<uint16_t>(w_.v) + i * kv + column;
                      } else {
                        out = mine<uint16_t>(w_.u) + i * q + column - kv;
                      }
                      *out = to_bf16(sum);
                    });
    if (!rank_barrier(place_, Phase::kAttention)) return false;
    norm_heads(l);
    if (!rank_barrier(place_, Phase::kAttention)) return false;
    attend_rows(l);
    if (!rank_barrier(place_, Phase::kOutput)) return false;
    return row_parallel(weights().o + p_.o(l), mine<uint16_t>(w_.o), q, 0, Phase::kOutput) && branch(l, 0);
  }

  // q and k: norm and rotation by one warp per head; k and v go to the cache.
  __device__ void norm_heads(int64_t l) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int q_heads = static_cast<int>(p_.q_heads / kRanks), kv_heads = static_cast<int>(p_.kv_rank()),
              heads = q_heads + kv_heads;
    for (int unit = place_.index * kWarps + warp; unit < n_ * heads; unit += place_.size * kWarps) {
      const int i = unit / heads, head = unit % heads;
      uint16_t* x = head < q_heads ? mine<uint16_t>(w_.q) + i * p_.q_columns() + head * kHeadDim
                                   : mine<uint16_t>(w_.k) + i * p_.kv_columns() + (head - q_heads) * kHeadDim;
      float own[4];
      for (int e = 0; e < 4; ++e) own[e] = from_bf16(x[lane % 16 + 16 * e]);
      const float r = inverse_rms(warp_sumsq64(own), kHeadDim, p_.eps);
      float y0 = round_bf16(from_bf16(x[2 * lane]) * r), y1 = round_bf16(from_bf16(x[2 * lane + 1]) * r);
      if (p_.kind[l].rope) {
        const float* table = a_.shared.rope + int64_t{s_.rows.position[i]} * kHeadDim;
        const float cosine = table[lane], sine = table[lane + kHeadDim / 2];
        const float z0 = round_bf16(y0 * cosine - y1 * sine), z1 = round_bf16(y0 * sine + y1 * cosine);
        y0 = z0;
        y1 = z1;
      }
      const uint32_t pair = pack(to_bf16(y0), to_bf16(y1));
      __syncwarp();
      if (head < q_heads) {
        reinterpret_cast<uint32_t*>(x)[lane] = pair;
      } else {
        const uint32_t value =
            pair_at(mine<uint16_t>(w_.v) + i * p_.kv_columns() + (head - q_heads) * kHeadDim + 2 * lane);
        const auto finite = [](uint32_t two) {
          return bf16_finite(static_cast<uint16_t>(two)) && bf16_finite(static_cast<uint16_t>(two >> 16));
        };
        const bool keep = __all_sync(~0u, finite(pair) && finite(value));
        const int64_t slot = p_.slot(l, s_.rows.committed[i] + s_.rows.index[i]);
        const int64_t at = p_.cache(l, s_.rows.sequence[i], head - q_heads, slot);
        const bool full = p_.kind[l].full;
        reinterpret_cast<uint32_t*>((full ? weights().k_full : weights().k_ring) + at)[lane] =
            keep ? pair : pack(kNan16, kNan16);
        reinterpret_cast<uint32_t*>((full ? weights().v_full : weights().v_ring) + at)[lane] = keep ? value : 0u;
      }
    }
  }

  __device__ void attend_rows(int64_t l) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int kv_heads = static_cast<int>(p_.kv_rank()), group = static_cast<int>(p_.q_heads / p_.kv_heads);
    const bool full = p_.kind[l].full;
    for (int unit = place_.index; unit < n_ * kv_heads; unit += place_.size) {
      const int i = unit / kv_heads, head = unit % kv_heads;
      const int64_t base = p_.cache(l, s_.rows.sequence[i], head, 0);
      const AttentionUnit work{&p_,
                               l,
                               &s_.rows,
                               i,
                               (full ? weights().k_full : weights().k_ring) + base,
                               (full ? weights().v_full : weights().v_ring) + base,
                               mine<uint16_t>(w_.q) + i * p_.q_columns() + head * group * kHeadDim,
                               group};
      attend(work, s_.attention);
      for (int h = warp; h < group; h += kWarps) {
        const uint16_t* a = s_.attention.a[h];
        float own[4];
        for (int e = 0; e < 4; ++e) own[e] = from_bf16(a[lane % 16 + 16 * e]);
        const float r = inverse_rms(warp_sumsq64(own), kHeadDim, p_.eps);
        const int64_t column = (head * group + h) * kHeadDim;
        for (int d = lane; d < kHeadDim; d += 32) {
          const float u = from_bf16(mine<uint16_t>(w_.u)[i * p_.q_columns() + column + d]);
          mine<uint16_t>(w_.o)[i * p_.q_columns() + permuted(column + d)] = to_bf16((from_bf16(a[d]) * r) * sigmoid(u));
        }
      }
      __syncthreads();
    }
  }

  // --- experts -----------------------------------------------------------------------------------------------------

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

  const LayersArgs& a_;
  const Plan& p_;
  const Workspace& w_;
  Shared& s_;
  Place place_;
  const int me_;
  int n_ = 0;
};

__global__ void __launch_bounds__(kThreads, 1) decode_layers(const __grid_constant__ LayersArgs args) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const uint32_t size = gridDim.x / args.local_count, which = blockIdx.x / size;
  const int rank = args.local[which];
  if (rank == args.silent_rank) return;
  Control* control = reinterpret_cast<Control*>(args.workspace[rank]);
  Place place{control,
              args.report[rank],
              now() + args.wait_limit_ns,
              static_cast<uint32_t>(rank),
              blockIdx.x % size,
              size,
              0,
              0,
              0};
  place.layer = static_cast<uint32_t>(args.plan.layer_begin);
  place.epoch = load_relaxed(&control->epoch);
  Step step(args, shared, place);
  // The last barrier lies behind every block's reading of the old epoch.
  if (step.run() && place.index == 0 && threadIdx.x == 0) {
    control->epoch = step.epoch();
    if (which == 0) args.epoch[1] += 1;
  }
}

}  // namespace

int64_t layers_shared_bytes(const Plan& plan) {
  const int64_t row_floats = std::max({2 * plan.hidden, plan.moe_hidden, kMaxRows * plan.top_k});
  return static_cast<int64_t>(sizeof(Shared)) + row_floats * static_cast<int64_t>(sizeof(float));
}

Status prepare_layers(const Plan& plan, int* blocks) {
  const auto fail = [](const char* what, cudaError_t e) {
    return Status{std::string("decode_layers: ") + what + ": " + cudaGetErrorString(e)};
  };
  if (plan.q_heads / plan.kv_heads > kMaxGroup)
    return {"decode_layers: " + std::to_string(plan.q_heads / plan.kv_heads) + " query heads per kv head, at most 16"};
  if (plan.experts > 1024) return {"decode_layers: " + std::to_string(plan.experts) + " experts, at most 1024"};
  const int64_t bytes = layers_shared_bytes(plan);
  cudaError_t e =
      cudaFuncSetAttribute(decode_layers, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (e != cudaSuccess) return fail(("a block needs " + std::to_string(bytes) + " bytes of shared memory").c_str(), e);
  int device = 0, multiprocessors = 0, per_multiprocessor = 0;
  if ((e = cudaGetDevice(&device)) != cudaSuccess) return fail("no device", e);
  if ((e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device)) != cudaSuccess)
    return fail("device", e);
  if ((e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, decode_layers, kThreads, bytes)) !=
      cudaSuccess)
    return fail("occupancy", e);
  *blocks = multiprocessors * (per_multiprocessor ? 1 : 0);
  return *blocks > 0 ? Status{} : Status{"decode_layers: a block does not fit on a multiprocessor"};
}

Status launch_layers(Stream stream, const LayersArgs& args, int blocks) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  cudaError_t e = cudaSuccess;
  // Inactive rows read as zeros.
  const Plan& p = args.plan;
  const int64_t run = p.layer_end - p.layer_begin;
  const auto clear = [&](void* data, int64_t bytes) {
    if (e == cudaSuccess && data && bytes) e = cudaMemsetAsync(data, 0, bytes, cuda_stream);
  };
  clear(args.results.stream, p.rows * p.hidden * 4);
  if (args.results.tap_residuals) {
    clear(args.results.tap_residuals, run * 2 * p.rows * p.hidden * 4);
    clear(args.results.tap_experts, run * p.rows * p.top_k * 4);
    clear(args.results.tap_weights, run * p.rows * p.top_k * 4);
  }
  for (int i = 0; i < args.local_count; ++i)
    clear(args.workspace[args.local[i]] + offsetof(Control, barrier), sizeof(Control::barrier));
  if (e == cudaSuccess) {
    const int grid = blocks / args.local_count * args.local_count;
    decode_layers<<<grid, kThreads, layers_shared_bytes(p), cuda_stream>>>(args);
    e = cudaGetLastError();
  }
  return e == cudaSuccess ? Status{} : Status{std::string("decode_layers: ") + cudaGetErrorString(e)};
}

}  // namespace muse
