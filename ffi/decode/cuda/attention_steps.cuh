// Attention of a layer: projections, head norms and cache, attention itself, o_proj.
#pragma once

#include "ffi/decode/cuda/rows_steps.cuh"

namespace muse {

class AttentionSteps : protected RowSteps {
 public:
  using RowSteps::epoch;
  using RowSteps::RowSteps;

 protected:
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
};

}  // namespace muse
