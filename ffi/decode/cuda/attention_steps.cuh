// Attention of a layer: head norms and cache, attention itself, its gate.
#pragma once

#include "ffi/decode/cuda/attention.cuh"
#include "ffi/decode/cuda/rows_steps.cuh"

namespace muse {

class AttentionSteps : public RowSteps {
 public:
  using RowSteps::RowSteps;

  // One warp per row and head: adds the segments; q and k are normed and rotated; k and v go to the cache.
  __device__ void finish_heads(int64_t l) {
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    const int q_heads = static_cast<int>(p_.q_heads / kRanks), kv_heads = static_cast<int>(p_.kv_rank()),
              heads = 2 * q_heads + kv_heads, columns = static_cast<int>(p_.qkvu_rows());
    const float* sums = mine<float>(w_.segment_sums);
#pragma unroll 1
    for (int unit = warp * blocks() + block(); unit < rows() * heads; unit += blocks() * kWarps) {
      const int i = unit / heads, head = unit - i * heads;
      // q, k and u heads; v goes with k.
      const int place = head < q_heads + kv_heads ? head : head + kv_heads;
      const uint32_t two = add_segments(sums, kMaxRows, columns, i, place * kHeadDim + 2 * lane);
      if (head >= q_heads + kv_heads) {  // u
        const int at = i * q_heads + head - q_heads - kv_heads;
        reinterpret_cast<uint32_t*>(mine<uint16_t>(w_.u) + at * kHeadDim)[lane] = two;
        continue;
      }
      float own[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {  // element j + 16 e of the head
        const uint32_t pair = __shfl_sync(~0u, two, (lane % 16 + 16 * e) / 2);
        own[e] = lane % 2 ? high_bf16(pair) : low_bf16(pair);
      }
      const float r = inverse_rms(warp_sumsq64(own), kHeadDim, p_.eps);
      float y0 = round_bf16(low_bf16(two) * r), y1 = round_bf16(high_bf16(two) * r);
      if (p_.kind[l].rope) {
        const float* table = a_.shared.rope + s_.rows.position[i] * kHeadDim;
        const float cosine = table[lane], sine = table[lane + kHeadDim / 2];
        const float z0 = round_bf16(y0 * cosine - y1 * sine), z1 = round_bf16(y0 * sine + y1 * cosine);
        y0 = z0;
        y1 = z1;
      }
      const uint32_t pair = pack(to_bf16(y0), to_bf16(y1));
      if (head < q_heads)
        reinterpret_cast<uint32_t*>(mine<uint16_t>(w_.q) + (i * q_heads + head) * kHeadDim)[lane] = pair;
      else
        cache(l, i, head - q_heads, pair,
              add_segments(sums, kMaxRows, columns, i, (head + kv_heads) * kHeadDim + 2 * lane));
    }
  }

  // A unit is one row, kv head and chunk, so that even one row keeps many blocks busy; where the scratch does not hold
  // so many sums, a stretch of chunks; or all. Whoever finishes the last unit of a row and head adds them up.
  __device__ void attend_rows(int64_t l) {
    const int kv_heads = static_cast<int>(p_.kv_rank());
    const int window = p_.kind[l].full ? 0x7FFFFFFF : static_cast<int>(p_.window);
    const auto first = [&](int i) { return max(s_.rows.position[i] - window + 1, 0); };
    const auto count = [&](int i, int length) { return s_.rows.position[i] / length - first(i) / length + 1; };
    int chunks = 0, stretches = 0;
#pragma unroll 1
    for (int i = 0; i < rows(); ++i) chunks += count(i, kChunk) * kv_heads, stretches += count(i, kStretch) * kv_heads;
    const int length = chunks <= kAttentionSums ? kChunk : stretches <= kAttentionSums ? kStretch : kWholeRow;
    int row = 0, before = 0;  // units of the rows before `row`
#pragma unroll 1
    for (int unit = block();; unit += blocks()) {
      int parts = 0;
#pragma unroll 1
      for (; row < rows(); ++row) {
        parts = count(row, length);
        if (unit - before < parts * kv_heads) break;
        before += parts * kv_heads;
      }
      if (row >= rows()) return;
      const int head = (unit - before) / parts, part = unit - before - head * parts;
      attend(l, row, head, length, part, parts, before + head * parts, first(row));
    }
  }

 private:
  __device__ void cache(int64_t l, int i, int head, uint32_t key, uint32_t value) {
    const int lane = thread_index() % 32;
    const auto finite = [](uint32_t two) {
      return bf16_finite(static_cast<uint16_t>(two)) && bf16_finite(static_cast<uint16_t>(two >> 16));
    };
    const bool keep = __all_sync(~0u, finite(key) && finite(value));
    const bool full = p_.kind[l].full;
    const int position = s_.rows.committed[i] + s_.rows.index[i],
              slot = full ? position : position % static_cast<int>(p_.ring);
    const int64_t at = p_.cache(l, s_.rows.sequence[i], head, slot);
    reinterpret_cast<uint32_t*>((full ? weights().k_full : weights().k_ring) + at)[lane] =
        keep ? key : pack(kNan16, kNan16);
    reinterpret_cast<uint32_t*>((full ? weights().v_full : weights().v_ring) + at)[lane] = keep ? value : 0u;
  }

  static constexpr int kWholeRow = 1 << 30;  // positions of a unit: all of a row's

  // Part `part` of `parts` of a row and head, each the part's share of positions aligned to `length`; the sums of part
  // 0 lie at index `sums`.
  __device__ __forceinline__ void attend(int64_t l, int row, int head, int length, int part, int parts, int sums,
                                         int first) {
    const int group = static_cast<int>(p_.q_heads / p_.kv_heads), width = group * kSumWidth;
    const int position = s_.rows.position[row], begin = first / length * length + part * length;
    const bool full = p_.kind[l].full;
    const int64_t base = p_.cache(l, s_.rows.sequence[row], head, 0);
    const AttentionUnit u{&s_.rows,
                          row,
                          global(full ? weights().k_full : weights().k_ring) + base,
                          global(full ? weights().v_full : weights().v_ring) + base,
                          mine<uint16_t>(w_.q) + (row * static_cast<int>(p_.kv_rank()) + head) * group * kHeadDim,
                          group,
                          full ? 0 : static_cast<int>(p_.ring),
                          p_.score_scale};
    ChunkShared& shared = *region<ChunkShared>();
    float *sum = region<float>(sizeof(ChunkShared)), *stretch = sum + width, *total = stretch + width;
    uint16_t* a = reinterpret_cast<uint16_t*>(total + width);
    float* stored = mine<float>(w_.stretch_sums) + int64_t{sums} * width;
    // Chunk sums are added within a stretch, stretch sums within the row, each from +0.
#pragma unroll 1
    for (int i = thread_index(); i < width; i += kThreads) stretch[i] = total[i] = 0.0f;
    const int last = min(position, length == kWholeRow ? position : begin + length - 1) / kChunk;
#pragma unroll 1
    for (int chunk = max(begin, first) / kChunk; chunk <= last; ++chunk) {
      attend_chunk(u, chunk, first, position, shared, length == kChunk ? stored + part * width : sum);
      sync_block();
      if (length == kChunk) break;
      const bool ends = chunk == last || (chunk + 1) % (kStretch / kChunk) == 0;
#pragma unroll 1
      for (int i = thread_index(); i < width; i += kThreads) {
        stretch[i] = stretch[i] + sum[i];
        if (!ends) continue;
        total[i] = total[i] + stretch[i];
        stretch[i] = 0.0f;
      }
    }
    if (length != kWholeRow) {
      if (length == kStretch) {
#pragma unroll 1
        for (int i = thread_index(); i < width; i += kThreads) stored[part * width + i] = total[i];
      }
      if (!last_arrival(mine<uint32_t>(w_.stretch_counts) + row * static_cast<int>(p_.kv_rank()) + head, parts)) return;
      const int index = first / length, per_stretch = kStretch / length;  // of the first part
#pragma unroll 1
      for (int i = thread_index(); i < width; i += kThreads) {
        float own = 0.0f, all = 0.0f;
#pragma unroll 4
        for (int c = 0; c < parts; ++c) {
          own = own + __ldcg(stored + c * width + i);
          if ((index + c + 1) % per_stretch == 0 || c == parts - 1) all = all + own, own = 0.0f;
        }
        total[i] = all;
      }
    }
    sync_block();
#pragma unroll 1
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
    const int warp = thread_index() / 32, lane = thread_index() % 32, width = static_cast<int>(p_.q_columns());
#pragma unroll 1
    for (int h = warp; h < group; h += kWarps) {
      const uint16_t* own_head = a + h * kHeadDim;
      float own[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) own[e] = from_bf16(own_head[lane % 16 + 16 * e]);
      const float r = inverse_rms(warp_sumsq64(own), kHeadDim, p_.eps);
      const int column = (head * group + h) * kHeadDim + 2 * lane;
      const uint32_t u = __ldcg(reinterpret_cast<uint32_t*>(mine<uint16_t>(w_.u) + row * width + column));
      const auto gated = [&](uint16_t x, float by) { return to_bf16((from_bf16(x) * r) * sigmoid(by)); };
      *reinterpret_cast<uint32_t*>(mine<uint16_t>(w_.o) + column_tile_at(row, column, width)) =
          pack(gated(own_head[2 * lane], low_bf16(u)), gated(own_head[2 * lane + 1], high_bf16(u)));
    }
  }
};

}  // namespace muse
