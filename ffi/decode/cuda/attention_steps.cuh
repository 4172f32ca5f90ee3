// Attention of a layer: projections, head norms and cache, attention itself, o_proj.
#pragma once

#include "ffi/decode/cuda/attention.cuh"
#include "ffi/decode/cuda/rows_steps.cuh"

namespace muse {

class AttentionSteps : protected RowSteps {
 public:
  using RowSteps::RowSteps;

 protected:
  // From h to the operand of o_proj.
  __device__ bool attention(int64_t l) {
    float* sums = mine<float>(w_.segment_sums);
    dense(
        qkvu_job(p_, weights(), l), mine<uint16_t>(w_.h), p_.hidden,
        [&](int group, int segment, int i0, const Accumulators& acc) {
          store_sums(sums, kMaxRows, p_.qkvu_rows(), group, segment, i0, acc);
        },
        [](int, Range) {});
    if (!rank_barrier(Phase::kAttention)) return false;
    finish_heads(l);
    if (!rank_barrier(Phase::kAttention)) return false;
    attend_rows(l);
    return rank_barrier(Phase::kOutput);
  }

  // One warp per row and head: adds the segments; q and k are normed and rotated; k and v go to the cache.
  __device__ void finish_heads(int64_t l) {
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    const int q_heads = static_cast<int>(p_.q_heads / kRanks), kv_heads = static_cast<int>(p_.kv_rank()),
              heads = 2 * q_heads + kv_heads;
    for (int unit = warp * place_.size + place_.index; unit < rows() * heads; unit += place_.size * kWarps) {
      const int i = unit / heads, head = unit % heads;
      if (head >= q_heads + kv_heads) {  // u
        const int64_t column = int64_t{head - q_heads - kv_heads} * kHeadDim;
        const uint32_t two = columns(i, p_.q_columns() + 2 * p_.kv_columns() + column);
        reinterpret_cast<uint32_t*>(mine<uint16_t>(w_.u) + i * p_.q_columns() + column)[lane] = two;
        continue;
      }
      const uint32_t two =
          columns(i, head < q_heads ? head * kHeadDim : p_.q_columns() + int64_t{head - q_heads} * kHeadDim);
      float own[4];
      for (int e = 0; e < 4; ++e) {  // element j + 16 e of the head
        const uint32_t pair = __shfl_sync(~0u, two, (lane % 16 + 16 * e) / 2);
        own[e] = from_bf16(static_cast<uint16_t>(lane % 2 ? pair >> 16 : pair));
      }
      const float r = inverse_rms(warp_sumsq64(own), kHeadDim, p_.eps);
      float y0 = round_bf16(from_bf16(static_cast<uint16_t>(two)) * r);
      float y1 = round_bf16(from_bf16(static_cast<uint16_t>(two >> 16)) * r);
      if (p_.kind[l].rope) {
        const float* table = a_.shared.rope + int64_t{s_.rows.position[i]} * kHeadDim;
        const float cosine = table[lane], sine = table[lane + kHeadDim / 2];
        const float z0 = round_bf16(y0 * cosine - y1 * sine), z1 = round_bf16(y0 * sine + y1 * cosine);
        y0 = z0;
        y1 = z1;
      }
      const uint32_t pair = pack(to_bf16(y0), to_bf16(y1));
      if (head < q_heads)
        reinterpret_cast<uint32_t*>(mine<uint16_t>(w_.q) + i * p_.q_columns() + head * kHeadDim)[lane] = pair;
      else
        cache(l, i, head - q_heads, pair);
    }
  }

  // The lane's two columns of a head that starts at `column` of qkvu.
  __device__ uint32_t columns(int i, int64_t column) const {
    const float* sums = mine<float>(w_.segment_sums) + column + 2 * (thread_index() % 32);
    float s[2][kSegments];
#pragma unroll
    for (int r = 0; r < kSegments; ++r) {
      const float2 two = __ldcg(reinterpret_cast<const float2*>(sums + (r * kMaxRows + i) * p_.qkvu_rows()));
      s[0][r] = two.x;
      s[1][r] = two.y;
    }
    return pack(to_bf16(tree8(s[0])), to_bf16(tree8(s[1])));
  }

  __device__ void cache(int64_t l, int i, int head, uint32_t key) {
    const int lane = thread_index() % 32;
    const uint32_t value = columns(i, p_.q_columns() + p_.kv_columns() + int64_t{head} * kHeadDim);
    const auto finite = [](uint32_t two) {
      return bf16_finite(static_cast<uint16_t>(two)) && bf16_finite(static_cast<uint16_t>(two >> 16));
    };
    const bool keep = __all_sync(~0u, finite(key) && finite(value));
    const int64_t slot = p_.slot(l, s_.rows.committed[i] + s_.rows.index[i]);
    const int64_t at = p_.cache(l, s_.rows.sequence[i], head, slot);
    const bool full = p_.kind[l].full;
    reinterpret_cast<uint32_t*>((full ? weights().k_full : weights().k_ring) + at)[lane] =
        keep ? key : pack(kNan16, kNan16);
    reinterpret_cast<uint32_t*>((full ? weights().v_full : weights().v_ring) + at)[lane] = keep ? value : 0u;
  }

  // A unit is one row, kv head and stretch; whoever finishes the last stretch of a row and head adds them up. Where the
  // scratch does not hold so many, a unit is all stretches of a row and head.
  __device__ void attend_rows(int64_t l) {
    const int kv_heads = static_cast<int>(p_.kv_rank());
    const auto first_stretch = [&](int i) {
      return static_cast<int>(p_.first_visible(l, s_.rows.position[i]) / kStretch);
    };
    const auto stretches = [&](int i) { return s_.rows.position[i] / kStretch - first_stretch(i) + 1; };
    int total = 0;
    for (int i = 0; i < rows(); ++i) total += stretches(i) * kv_heads;
    const bool split = total <= kStretchSums;
    int row = 0, before = 0;  // units of the rows before `row`
    for (int unit = place_.index; unit < (split ? total : rows() * kv_heads); unit += place_.size) {
      for (int own; unit - before >= (own = (split ? stretches(row) : 1) * kv_heads); ++row) before += own;
      const int count = stretches(row), parts = split ? count : 1;
      const int head = (unit - before) / parts, part = (unit - before) % parts;
      attend(l, row, head, first_stretch(row) + (split ? part : 0), split ? 1 : count, parts, before + head * parts);
    }
  }

  // Stretches [stretch, stretch + count) of a row and head that has `parts` units; the first unit's sums lie at `sums`.
  __device__ void attend(int64_t l, int row, int head, int stretch, int count, int parts, int sums) {
    const int warp = thread_index() / 32, group = static_cast<int>(p_.q_heads / p_.kv_heads), width = group * kSumWidth;
    const bool full = p_.kind[l].full;
    const int64_t base = p_.cache(l, s_.rows.sequence[row], head, 0);
    const AttentionUnit u{&p_,
                          l,
                          &s_.rows,
                          row,
                          (full ? weights().k_full : weights().k_ring) + base,
                          (full ? weights().v_full : weights().v_ring) + base,
                          mine<uint16_t>(w_.q) + row * p_.q_columns() + head * group * kHeadDim,
                          group};
    float *chunk = region<float>(), *total = chunk + kWarps * width;
    uint16_t* a = reinterpret_cast<uint16_t*>(total + width);
    uint32_t q[4][2];
    load_queries(u, q);
    for (int s = 0; s < count; ++s) {
      attend_chunk(u, int64_t{stretch + s} * kChunksPerStretch + warp, q, chunk + warp * width);
      sync_block();
      for (int i = thread_index(); i < width; i += kThreads) {
        float sum = 0.0f;
        for (int c = 0; c < kWarps; ++c) sum = sum + chunk[c * width + i];
        total[i] = (s ? total[i] : 0.0f) + sum;
      }
      sync_block();
    }
    if (parts > 1) {
      float* stored = mine<float>(w_.stretch_sums) + int64_t{sums} * width;
      const int part = stretch - static_cast<int>(p_.first_visible(l, s_.rows.position[row]) / kStretch);
      for (int i = thread_index(); i < width; i += kThreads) stored[part * width + i] = total[i];
      if (!last_arrival(mine<uint32_t>(w_.stretch_counts) + row * p_.kv_rank() + head, parts)) return;
      for (int i = thread_index(); i < width; i += kThreads) {
        float sum = 0.0f;
#pragma unroll 8
        for (int c = 0; c < parts; ++c) sum = sum + __ldcg(stored + c * width + i);
        total[i] = sum;
      }
      sync_block();
    }
    for (int i = thread_index(); i < group * kHeadDim; i += kThreads) {
      const float* of = total + i / kHeadDim * kSumWidth;
      a[i] = to_bf16(of[i % kHeadDim] / of[kHeadDim]);
    }
    sync_block();
    gate(row, head, group, a);
    sync_block();
  }

  // Called by all; true in the block that comes last of `count`, which then sees what the others wrote.
  __device__ bool last_arrival(uint32_t* counter, uint32_t count) {
    sync_block();
    if (thread_index() == 0) {
      __threadfence();
      const bool last = atomicAdd(counter, 1u) == count - 1;
      if (last) *counter = 0;  // for the next layer, which lies behind barriers
      __threadfence();
      s_.flag = last;
    }
    sync_block();
    return s_.flag;
  }

  // o = R((a * r64) * sigmoid(u)) for the query heads of one kv head.
  __device__ void gate(int row, int head, int group, const uint16_t* a) {
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    for (int h = warp; h < group; h += kWarps) {
      const uint16_t* own_head = a + h * kHeadDim;
      float own[4];
      for (int e = 0; e < 4; ++e) own[e] = from_bf16(own_head[lane % 16 + 16 * e]);
      const float r = inverse_rms(warp_sumsq64(own), kHeadDim, p_.eps);
      const int64_t column = int64_t{head * group + h} * kHeadDim + 2 * lane;
      const uint32_t u = __ldcg(reinterpret_cast<uint32_t*>(mine<uint16_t>(w_.u) + row * p_.q_columns() + column));
      const auto gated = [&](uint16_t x, uint16_t by) { return to_bf16((from_bf16(x) * r) * sigmoid(from_bf16(by))); };
      *reinterpret_cast<uint32_t*>(mine<uint16_t>(w_.o) + column_tile_at(row, column, p_.q_columns())) =
          pack(gated(own_head[2 * lane], static_cast<uint16_t>(u)),
               gated(own_head[2 * lane + 1], static_cast<uint16_t>(u >> 16)));
    }
  }
};

}  // namespace muse
