// Attention of a layer: head norms and cache, attention itself, its gate.
#pragma once

#include "ffi/decode/cuda/attention.cuh"
#include "ffi/decode/cuda/rows_steps.cuh"

namespace muse {

class AttentionSteps : public RowSteps {
 public:
  using RowSteps::RowSteps;

  // One warp per row and head: adds the segments; q and k are normed and rotated; k and v go to the cache.
  __device__ void finish_heads() {
    const int heads = 2 * q_heads() + s_.attention.kv_heads;
#pragma unroll 1
    for (int unit = warp_index() * blocks() + first_unit(2); unit < rows() * heads; unit += blocks() * kWarps)
      run_phase<&AttentionSteps::finish_head>(unit / heads, unit % heads);
  }

  // Row i's heads are those of q, k and u; v goes with k.
  __device__ void finish_head(int i, int head) {
    const bool query = head < q_heads(), gate = head >= q_heads() + s_.attention.kv_heads;
    const uint32_t two = head_columns(i, gate ? head + s_.attention.kv_heads : head);
    const uint32_t value = query || gate ? 0u : head_columns(i, head + s_.attention.kv_heads);
    const int l = layer(), lane = lane_index();
    if (gate) {
      const int at = i * q_heads() + head - q_heads() - s_.attention.kv_heads;
      reinterpret_cast<uint32_t*>(mine<uint16_t>(w_.u) + at * kHeadDim)[lane] = two;
      return;
    }
    const float r = head_scale(two, lane);
    float y0 = round_bf16(low_bf16(two) * r), y1 = round_bf16(high_bf16(two) * r);
    if (p_.kind[l].rope) {
      const float* table = a_.shared.rope + s_.rows.position[i] * kHeadDim;
      const float cosine = table[lane], sine = table[lane + kHeadDim / 2];
      const float z0 = round_bf16(y0 * cosine - y1 * sine), z1 = round_bf16(y0 * sine + y1 * cosine);
      y0 = z0;
      y1 = z1;
    }
    const uint32_t pair = pack(to_bf16(y0), to_bf16(y1));
    if (query)
      reinterpret_cast<uint32_t*>(mine<uint16_t>(w_.q) + (i * q_heads() + head) * kHeadDim)[lane] = pair;
    else
      cache(l, i, head - q_heads(), pair, value);
  }

  // The units of attention_schedule.cuh.
  __device__ void attend_rows() {
    const int l = layer();
#pragma unroll 1
    for (int unit = block(); unit < s_.attention.kind[p_.kind[l].full].units; unit += blocks()) attend(l, unit);
  }

  // Each row and kv head by whichever block it falls to, as soon as its sums are there.
  __device__ void finish_rows() {
    const LayerUnits& kind = s_.attention.kind[p_.kind[layer()].full];
    // From the last block on: the first ones have the most units.
    int i = blocks() - 1 - block();
#pragma unroll 1
    for (int head = 0; head < s_.attention.kv_heads; ++head) {
#pragma unroll 1
      for (; i < rows(); i += blocks()) finish(kind, i, head);
      i -= rows();
    }
  }

 private:
  __device__ int q_heads() const { return s_.attention.kv_heads * s_.attention.group; }  // of the rank

  // A lane's two columns of a head of row i.
  __device__ uint32_t head_columns(int i, int head) const {
    const int columns = static_cast<int>(p_.qkvu_rows());
    return wait_segments(place_, Phase::kAttention,
                         mine<uint64_t>(w_.head_sums) + i * columns + head * kHeadDim + 2 * lane_index(),
                         kMaxRows * columns);
  }

  // 1 / rms of a head by one warp, two neighbouring elements a lane.
  __device__ float head_scale(uint32_t two, int lane) const {
    float own[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {  // element j + 16 e
      const uint32_t pair = __shfl_sync(~0u, two, (lane % 16 + 16 * e) / 2);
      own[e] = lane % 2 ? high_bf16(pair) : low_bf16(pair);
    }
    return rms_factor(warp_sumsq64(own), kHeadDim, p_.eps);
  }

  __device__ void cache(int l, int i, int head, uint32_t key, uint32_t value) {
    const int lane = lane_index();
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

  // Where the sums of a row and head begin; the parts follow each other.
  __device__ uint64_t* sums_of(const LayerUnits& kind, int sequence, int index, int head, int parts) const {
    const int at = kind.sum[sequence] + (index * s_.attention.kv_heads + head) * parts;
    return mine<uint64_t>(w_.stretch_sums) + int64_t{at} * (s_.attention.group * kSumWidth);
  }

  __device__ __forceinline__ void attend(int l, int unit) {
    const bool full = p_.kind[l].full;
    const LayerUnits& kind = s_.attention.kind[full];
    const int lane = lane_index(), warp = warp_index(), kv_heads = s_.attention.kv_heads;
    const int sequence = __popc(__ballot_sync(~0u, kind.unit[lane] <= unit)) +
                         __popc(__ballot_sync(~0u, kind.unit[lane + 32] <= unit)) - 1;
    const SequenceRows& s = s_.attention.sequence[sequence];
    const int run = kind.run, window = kind.window, width = s_.attention.group * kSumWidth;
    const SequenceChunks c = s.chunks(window);
    const int groups = (s.count + (1 << kind.group) - 1) >> kind.group, shared_units = c.runs(run) * kv_heads * groups;
    const int local = unit - kind.unit[sequence];
    const bool own = local >= shared_units;
    // Units that share keys and values follow each other.
    const int minor = own ? s.count : groups, index = own ? local - shared_units : local, of_kv = index / minor,
              of_group = index - of_kv * minor, major = of_kv / kv_heads, head = of_kv - major * kv_heads;
    const int row = own ? of_group : of_group << kind.group;
    const uint8_t* member = s_.attention.member + s.begin + row;
    const int lowest = own ? s_.rows.position[*member] : s.lowest;
    const int64_t base = p_.cache(l, s_.rows.sequence[*member], head, 0);
    const AttentionUnit u{s_.attention,
                          kind,
                          member,
                          own ? 1 : min(s.count - row, 1 << kind.group),
                          own ? c.own + major : max(c.first, ((c.first >> run) + major) << run),
                          own ? c.own + major + 1 : min(c.own, ((c.first >> run) + major + 1) << run),
                          max(lowest - window + 1, 0),
                          own ? lowest : s.highest,
                          global(full ? weights().k_full : weights().k_ring) + base,
                          global(full ? weights().v_full : weights().v_ring) + base};
    const int parts = c.parts(run), stride = kv_heads * parts * width;
    uint64_t* out = sums_of(kind, sequence, row, head, parts);
    const bool whole = run == kWholeRun && !own;
    if (own)
      out += (c.shared_parts(run) + major) * width;
    else if (run <= kStretchLog2)
      out += (run == kStretchLog2 ? major : u.begin - c.first) * width;

    AttentionShared& shared = *region<AttentionShared>();
    AttentionSums sums{};
    KeyBlock keys;
    // The first round only loads: one copy of that code.
    int chunk = u.begin - 1;
    ptx::opaque(chunk);
#pragma unroll 1
    for (; chunk < u.end; ++chunk) {
      const int start = chunk * kChunk + 16 * warp, slot = block_slot(u, s_.rows, start + kChunk);
      const bool more = chunk + 1 < u.end, loaded = chunk >= u.begin;
      if (more) prefetch_block(u, start + kChunk, slot, shared);
      next_values();
      if (loaded) score_rows(u, s_.rows, start, keys, shared);
      if (more) load_keys(u, slot, keys);
      if (!loaded) {
        const int queries = s_.attention.group * kHeadDim;  // of a row and kv head
        load_queries(u, mine<uint16_t>(w_.q) + head * queries, s_.attention.kv_heads * queries, shared);
      }
      wait_values();
      sync_block();
      if (!loaded) continue;
      add_chunk(u.rows, chunk, shared, sums);
      const bool ends = (chunk + 1) % kStretch == 0;
      if (run < kStretchLog2 || ends || chunk + 1 == u.end) {
        // All full stretches of a whole row are one part.
        const bool later = chunk / kStretch != u.begin / kStretch;
        if (whole && !ends && later) out += width;
        if (whole && ends && later) add_stored_sums(u, sums, out, stride);
        // Not to be seen yet where it is stored once more.
        const bool done = !whole || !ends || chunk + kStretch >= u.end;
        store_chunk_sums(u, sums, out, stride, place_.epoch - !done);
        if (!whole) out += width;
        sums = {};
      }
      sync_block();
    }
  }

  // Adds up the parts of row i and a kv head as they come, a warp per query head: parts within a stretch, stretches
  // within the row, each from +0.
  __device__ __forceinline__ void finish(const LayerUnits& kind, int i, int head) {
    const int warp = warp_index(), lane = lane_index(), heads = s_.attention.group, width = heads * kSumWidth;
    const int sequence = s_.attention.of[i], run = kind.run;
    const SequenceChunks c = s_.attention.sequence[sequence].chunks(kind.window);
    const int parts = c.parts(run), column = (head * heads + warp) * kHeadDim + 2 * lane,
              columns = static_cast<int>(p_.q_columns());
    const uint64_t* stored = sums_of(kind, sequence, s_.rows.index[i], head, parts);
    if (warp >= heads) return;
    const uint32_t gate = __ldcg(reinterpret_cast<uint32_t*>(mine<uint16_t>(w_.u) + i * columns + column));
    const uint64_t *numerators = stored + warp * kHeadDim + 2 * lane, *denominators = stored + heads * kHeadDim + warp;
    const uint32_t epoch = place_.epoch;
    constexpr int kAtOnce = 4;  // loads in flight
    float2 own{}, all{};
    float own_denominator = 0.0f, denominator = 0.0f;
#pragma unroll 1
    for (int first = 0; first < parts; first += kAtOnce) {
      float2 two[kAtOnce] = {};
      float ones[kAtOnce] = {};
      int late = -1;  // a part that was missing: all would be much to look at again and again
      const auto look = [&] {
        if (late >= 0 && is_stale(ptx::load_relaxed_sys(denominators + late * width), epoch)) return 0;
        late = -1;
        uint64_t word[kAtOnce][3];
#pragma unroll
        for (int e = 0; e < kAtOnce; ++e) {
          const int part = min(first + e, parts - 1);
          uint64_t pair[2];
          ptx::load_relaxed_gpu_v2(numerators + part * width, pair);
          word[e][0] = pair[0], word[e][1] = pair[1], word[e][2] = ptx::load_relaxed_sys(denominators + part * width);
        }
#pragma unroll
        for (int e = 0; e < kAtOnce; ++e) {
          two[e] = {slot_number(word[e][0]), slot_number(word[e][1])};
          ones[e] = slot_number(word[e][2]);
          if (is_stale(word[e][0], epoch) || is_stale(word[e][1], epoch) || is_stale(word[e][2], epoch))
            late = min(first + e, parts - 1);
        }
        return late < 0 ? -1 : 0;
      };
      wait_until(place_, Phase::kAttention, kBarrierGrace, look, [&](int) { return place_.rank; });
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) {
        if (first + e >= parts) break;
        own = {own.x + two[e].x, own.y + two[e].y};
        own_denominator = own_denominator + ones[e];
        if (!c.ends(run, first + e)) continue;
        all = {all.x + own.x, all.y + own.y};
        denominator = denominator + own_denominator;
        own = {};
        own_denominator = 0.0f;
      }
    }
    all = {all.x + own.x, all.y + own.y};  // the last stretch; +0 if it was complete
    denominator = denominator + own_denominator;
    const uint32_t o = gated(pack(to_bf16(all.x / denominator), to_bf16(all.y / denominator)), gate);
    store_slot(mine<uint64_t>(w_.o) + (i * columns + column) / 2, o, place_.epoch);
  }

  // o = R((a * r64) * sigmoid(u)) for one query head by one warp, two dimensions a lane.
  __device__ uint32_t gated(uint32_t a, uint32_t u) const {
    const float r = head_scale(a, lane_index());
    uint32_t o = 0;
#pragma unroll 1  // one copy of the sigmoid; the halves end in their places
    for (int e = 0; e < 2; ++e, a >>= 16, u >>= 16)
      o = __byte_perm(o, to_bf16((low_bf16(a) * r) * sigmoid_of(low_bf16(u))), 0x5432);
    return o;
  }
};

}  // namespace muse
