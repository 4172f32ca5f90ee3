// Attention of a layer: head norms and cache, attention itself, its gate.
#pragma once

#include "ffi/decode/cuda/attention.cuh"
#include "ffi/decode/cuda/rows_steps.cuh"

namespace muse {

// The data of four pairs of slots of the own rank, all loads in flight together.
struct Four {
  uint2 pair[4];
};
__device__ __forceinline__ Four wait_four(Place& place, uint32_t epoch, const uint64_t* s0, const uint64_t* s1,
                                          const uint64_t* s2, const uint64_t* s3) {
  Four data{};
  const auto look = [&] {
    uint64_t word[4][2];
    ptx::load_relaxed_gpu_v2(s0, word[0]);
    ptx::load_relaxed_gpu_v2(s1, word[1]);
    ptx::load_relaxed_gpu_v2(s2, word[2]);
    ptx::load_relaxed_gpu_v2(s3, word[3]);
    bool stale = false;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      data.pair[e] = {static_cast<uint32_t>(word[e][0]), static_cast<uint32_t>(word[e][1])};
      stale = stale || is_stale(word[e][0], epoch) || is_stale(word[e][1], epoch);
    }
    return stale ? 0 : -1;
  };
  wait_until(place, Phase::kAttention, kBarrierGrace, look, [&](int) { return place.rank; });
  return data;
}

class AttentionSteps : public RowSteps {
 public:
  using RowSteps::RowSteps;

  // One warp per row and head of q and k: adds the segments, norms and rotates; v goes with k, both to the cache.
  __device__ void finish_heads() {
    const int heads = q_heads() + s_.attention.kv_heads;
#pragma unroll 1
    for (int unit = warp_index() * blocks() + first_unit(2); unit < rows() * heads; unit += blocks() * kWarps)
      run_phase<&AttentionSteps::finish_head>(unit / heads, unit % heads);
  }

  __device__ void finish_head(int i, int head) {
    const bool query = head < q_heads();
    const uint32_t two = head_columns(i, head, place_.epoch);
    const uint32_t value = query ? 0u : head_columns(i, head + s_.attention.kv_heads, place_.epoch);
    const int l = layer(), lane = lane_index();
    const float r = head_scale(two, p_.eps);
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
      store_head(w_.q, i * q_heads() + head, pair);
    else
      cache(l, i, head - q_heads(), pair, value);
  }

  // The units of attention_schedule.cuh.
  __device__ void attend_rows() {
#pragma unroll 1
    for (int unit = block(); unit < layer_units().units; unit += blocks()) {
      run_phase<&AttentionSteps::begin_unit>(unit);
      attend();
    }
  }

  // Each row and kv head by whichever block it falls to, as soon as its sums are there.
  __device__ void finish_rows() {
    const LayerUnits& kind = layer_units();
    // From the last block on: the first ones have the most units.
    int i = blocks() - 1 - block();
#pragma unroll 1
    for (int head = 0; head < s_.attention.kv_heads; ++head) {
#pragma unroll 1
      for (; i < rows(); i += blocks()) {
        run_phase<&AttentionSteps::fetch_gates>(i, head);  // while the parts come
        finish(kind, i, head);
      }
      i -= rows();
    }
  }

  // A thread's two columns of u for finish.
  __device__ void fetch_gates(int i, int head) {
    const int group = s_.attention.group, of_kv = min(warp_index(), group - 1);
    // Sums of this layer carry the epoch before (finish_heads).
    region<uint32_t>()[thread_index()] =
        head_columns(i, q_heads() + 2 * s_.attention.kv_heads + head * group + of_kv, place_.epoch - 1);
  }

 private:
  __device__ int q_heads() const { return s_.attention.kv_heads * s_.attention.group; }  // of the rank

  // A lane's two columns of a head of row i: q's, k's, v's, u's.
  __device__ uint32_t head_columns(int i, int head, uint32_t epoch) const {
    const int columns = static_cast<int>(p_.qkvu_rows());
    return wait_segments(place_, Phase::kAttention,
                         mine<uint64_t>(w_.head_sums) + i * columns + head * kHeadDim + 2 * lane_index(),
                         kMaxRows * columns, epoch);
  }

  // 1 / rms of a head by one warp, two neighbouring elements a lane. One piece of code.
  __device__ __noinline__ static float head_scale(uint32_t two, float eps) {
    const int lane = lane_index();
    float own[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {  // element j + 16 e
      const uint32_t pair = __shfl_sync(~0u, two, (lane % 16 + 16 * e) / 2);
      own[e] = lane % 2 ? high_bf16(pair) : low_bf16(pair);
    }
    return rms_factor(warp_sumsq64(own), kHeadDim, eps);
  }

  // A lane's two columns of a row's head, in the epoch that begins behind all heads.
  __device__ void store_head(int64_t address, int head, uint32_t two) {
    store_slot(mine<uint64_t>(address) + head * (kHeadDim / 2) + lane_index(), two, place_.epoch + 1);
  }

  // For later launches to the cache; this one's attention takes keys and values in flight from slots.
  __device__ void cache(int l, int i, int head, uint32_t key, uint32_t value) {
    const int lane = lane_index();
    const auto finite = [](uint32_t two) {
      return bf16_finite(static_cast<uint16_t>(two)) && bf16_finite(static_cast<uint16_t>(two >> 16));
    };
    if (!__all_sync(~0u, finite(key) && finite(value))) key = pack(kNan16, kNan16), value = 0u;
    store_head(w_.k, i * s_.attention.kv_heads + head, key);
    store_head(w_.v, i * s_.attention.kv_heads + head, value);
    const bool full = p_.kind[l].full;
    const int slot = layer_units().slots.of(s_.rows.committed[i] + s_.rows.index[i]);
    const int64_t at = cache_of(l, s_.rows.sequence[i], head) + slot * kHeadDim;
    reinterpret_cast<uint32_t*>((full ? weights().k_full : weights().k_ring) + at)[lane] = key;
    reinterpret_cast<uint32_t*>((full ? weights().v_full : weights().v_ring) + at)[lane] = value;
  }

  // Where the sums of a row and head begin; the parts follow each other.
  __device__ uint64_t* sums_of(const LayerUnits& kind, int sequence, int index, int head, int parts) const {
    const int at = kind.sum[sequence] + (index * s_.attention.kv_heads + head) * parts;
    return mine<uint64_t>(w_.stretch_sums) + int64_t{at} * (s_.attention.group * kSumWidth);
  }

  __device__ const LayerUnits& layer_units() const { return s_.attention.kind[p_.kind[layer()].full]; }

  // Where the cache of a sequence and head begins.
  __device__ int64_t cache_of(int l, int sequence, int head) const {
    const int before = (p_.kind[l].cache * static_cast<int>(p_.sequences) + sequence) * s_.attention.kv_heads + head;
    return int64_t{before} * static_cast<int>(p_.slots(l)) * kHeadDim;
  }

  // A unit of attention_schedule.cuh, and where in its sequence's units it stands. Its warps find it once, each for
  // itself, and leave it in shared memory.
  struct UnitPlace {
    AttentionUnit unit;
    int begin;  // of the sequence in AttentionSchedule::member
  };
  __device__ __forceinline__ UnitPlace find_unit(int unit) const {
    const int l = layer();
    const bool full = p_.kind[l].full;
    const LayerUnits& kind = s_.attention.kind[full];
    const int lane = lane_index(), kv_heads = s_.attention.kv_heads;
    const int sequence = __popc(__ballot_sync(~0u, kind.unit[lane] <= unit)) +
                         __popc(__ballot_sync(~0u, kind.unit[lane + 32] <= unit)) - 1;
    const SequenceRows& s = s_.attention.sequence[sequence];
    const int run = kind.run;
    const SequenceChunks c = s.chunks(kind.window);
    const int groups = (s.count + (1 << kind.group) - 1) >> kind.group, shared_units = c.runs(run) * kv_heads * groups;
    const int local = unit - kind.unit[sequence];
    const bool own = local >= shared_units;
    // Units that share keys and values follow each other.
    const uint32_t minor = own ? s.count : groups, index = own ? local - shared_units : local, of_kv = index / minor;
    const int of_group = index - of_kv * minor, major = s_.attention.by_heads.quotient(of_kv),
              head = of_kv - major * kv_heads;
    const int row = own ? of_group : of_group << kind.group, member = s_.attention.member[s.begin + row];
    const int lowest = own ? s_.rows.position[member] : s.lowest, first_run = c.first >> run;
    const int64_t base = cache_of(l, s_.rows.sequence[member], head);
    // The part of the sums that is its first.
    const int begin = own ? c.own + major : max(c.first, (first_run + major) << run),
              part = own                   ? c.shared_parts(run) + major
                     : run < kStretchLog2  ? begin - c.first
                     : run == kStretchLog2 ? major
                                           : 0;
    const int width = s_.attention.group * kSumWidth, parts = c.parts(run);
    return {{global(full ? weights().k_full : weights().k_ring) + base,
             global(full ? weights().v_full : weights().v_ring) + base,
             sums_of(kind, sequence, row, head, parts) + part * width, kv_heads * parts * width, s.begin + row,
             own ? 1 : min(s.count - row, 1 << kind.group), begin,
             own ? begin + 1 : min(c.own, (first_run + major + 1) << run), max(lowest - kind.window + 1, 0), head, own},
            s.begin};
  }

  // The A operands of a unit's rows: block b holds (head g, dimensions 16 b + 4 t to + 3) of two rows.
  __device__ __forceinline__ void load_queries(const AttentionUnit& u) {
    AttentionShared& shared = *region<AttentionShared>();
    const int warp = warp_index(), lane = lane_index(), b = warp % 4, g = lane / 4, t = lane % 4,
              group = s_.attention.group;
    const int first = warp / 4;  // the warp's tiles: this one and, if there is one, that after the next
    if (2 * first >= u.rows) return;
    // Of two rows, then of the other tile's; of the last one again where there is none.
    const auto slot = [&](int row) {
      const int i = s_.attention.member[u.member + min(2 * first + row, u.rows - 1)];
      const int query = (i * s_.attention.kv_heads + u.head) * group + min(g, group - 1);
      return mine<uint64_t>(w_.q) + (query * kHeadDim + 16 * b + 4 * t) / 2;
    };
    const Four two = wait_four(place_, place_.epoch, slot(0), slot(1), slot(4), slot(5));
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int tile = first + 2 * e;
      if (2 * tile >= u.rows) break;
      const uint2 even = two.pair[2 * e], odd = 2 * tile + 1 < u.rows ? two.pair[2 * e + 1] : uint2{0, 0};
      shared.q[tile][b][lane] = g < group ? uint4{even.x, odd.x, even.y, odd.y} : uint4{0, 0, 0, 0};
    }
  }

  // Starts to bring the keys and values of a unit of one row and one chunk with positions in flight. What was committed
  // before this launch lies in the cache; the rest comes from the slots of its rows; what the row does not see is
  // zeros.
  __device__ __forceinline__ void load_own_chunk(const UnitPlace& found) {
    const AttentionUnit& u = found.unit;
    AttentionShared& shared = *region<AttentionShared>();
    auto &keys = shared.value[1 - u.begin % 2], &values = shared.value[u.begin % 2];
    const CacheSlots slots = layer_units().slots;
    const int i = s_.attention.member[u.member], committed = s_.rows.committed[i], position = s_.rows.position[i],
              begin = u.begin * kChunk;
    const auto piece_at = [](uint32_t at) { return 8 * (at % 8 ^ at / 8 % 8); };
#pragma unroll 1
    for (uint32_t at = thread_index(); at < kChunk * 8; at += kThreads) {  // pieces of 16 bytes
      const int place = at / 8, now = begin + place;
      uint16_t *key = keys[place] + piece_at(at), *value = values[place] + piece_at(at);
      if (now >= u.first && now < committed) {
        const int from = slots.of(now) * kHeadDim + at % 8 * 8;
        ptx::copy16(ptx::shared_address(key), u.k + from);
        ptx::copy16(ptx::shared_address(value), u.v + from);
      } else if (now < u.first || now > position) {
        *reinterpret_cast<uint4*>(key) = *reinterpret_cast<uint4*>(value) = uint4{0, 0, 0, 0};
      }
    }
    const int skipped = max(max(committed, u.first) - begin, 0), end = min(position + 1 - begin, kChunk);
#pragma unroll 1
    for (uint32_t at = skipped * 8 + thread_index(); static_cast<int>(at) < end * 8; at += kThreads) {
      const int place = at / 8, of_row = s_.attention.member[found.begin + s_.rows.path[i][begin + place - committed]];
      const int from = (of_row * s_.attention.kv_heads + u.head) * (kHeadDim / 2) + at % 8 * 4;
      const uint64_t *key = mine<uint64_t>(w_.k) + from, *value = mine<uint64_t>(w_.v) + from;
      const auto [pair] = wait_four(place_, place_.epoch, key, key + 2, value, value + 2);
      *reinterpret_cast<uint4*>(keys[place] + piece_at(at)) = {pair[0].x, pair[0].y, pair[1].x, pair[1].y};
      *reinterpret_cast<uint4*>(values[place] + piece_at(at)) = {pair[2].x, pair[2].y, pair[3].x, pair[3].y};
    }
  }

  // What a unit needs first, on its way or there. Apart from attend, which has no registers for what those whom it
  // called would need.
  __device__ void begin_unit(int unit) {
    const UnitPlace found = find_unit(unit);
    const AttentionUnit& u = found.unit;
    AttentionShared& shared = *region<AttentionShared>();
    if (u.own)
      load_own_chunk(found);
    else
      prefetch_block(u.k, u.v, u.begin, block_slot(layer_units().slots, u.first, u.begin * kChunk + 16 * warp_index()),
                     shared);
    next_values();
    if (lane_index() == 0) shared.unit[warp_index()] = u;
    load_queries(u);
    if (u.own) {
      ptx::wait_all_copies();
      sync_block();
    }
    __syncwarp();
  }

  // The unit that begin_unit left.
  __device__ __forceinline__ void attend() {
    AttentionShared& shared = *region<AttentionShared>();
    const LayerUnits& kind = layer_units();
    const int warp = warp_index(), run = kind.run;
    const AttentionUnit& u = shared.unit[warp];  // read anew, not kept in registers
    const bool whole = run == kWholeRun && !u.own;
    uint64_t* out = u.sums;
    AttentionSums sums{};
    KeyBlock keys;
    // The first round only loads keys: one copy of that code.
    int chunk = u.begin - 1;
    ptx::opaque(chunk);
#pragma unroll 1
    for (; chunk < u.end; ++chunk) {
      const int start = chunk * kChunk + 16 * warp, slot = block_slot(kind.slots, u.first, start + kChunk);
      const bool more = chunk + 1 < u.end, loaded = chunk >= u.begin;
      if (loaded) {
        if (more) prefetch_block(u.k, u.v, chunk + 1, slot, shared);
        next_values();
        score_rows(s_.attention, kind.window, u, s_.rows, start, keys, shared);
      }
      if (more && u.own)
        load_keys(shared.value[chunk & 1], keys);
      else if (more)
        load_keys(u.k, slot, keys);
      wait_values();
      sync_block();
      if (!loaded) continue;
      add_chunk(u.rows, chunk, shared, sums);
      const bool ends = ((chunk + 1) & (kStretch - 1)) == 0;
      if (run < kStretchLog2 || ends || chunk + 1 == u.end) {
        const int group = s_.attention.group, width = group * kSumWidth;
        // All full stretches of a whole row are one part.
        const bool later = chunk >> kStretchLog2 != u.begin >> kStretchLog2;
        if (whole && !ends && later) out += width;
        // Not to be seen yet where it is stored once more.
        const bool done = !whole || !ends || chunk + kStretch >= u.end;
        store_part(group, u, sums, out, place_.epoch - !done, whole && ends && later);
        if (!whole) out += width;
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
    const StretchEnds ends(c, run);
    const int parts = c.parts(run), column = (head * heads + warp) * kHeadDim + 2 * lane,
              columns = static_cast<int>(p_.q_columns());
    const uint64_t* stored = sums_of(kind, sequence, s_.rows.index[i], head, parts);
    if (warp >= heads) return;
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
        if (!ends.after(first + e)) continue;
        all = {all.x + own.x, all.y + own.y};
        denominator = denominator + own_denominator;
        own = {};
        own_denominator = 0.0f;
      }
    }
    all = {all.x + own.x, all.y + own.y};  // the last stretch; +0 if it was complete
    denominator = denominator + own_denominator;
    const uint32_t o =
        gated(pack(to_bf16(all.x / denominator), to_bf16(all.y / denominator)), region<uint32_t>()[thread_index()]);
    store_slot(mine<uint64_t>(w_.o) + (i * columns + column) / 2, o, place_.epoch);
  }

  // o = R((a * r64) * sigmoid(u)) for one query head by one warp, two dimensions a lane.
  __device__ uint32_t gated(uint32_t a, uint32_t u) const {
    const float r = head_scale(a, p_.eps);
    uint32_t o = 0;
#pragma unroll 1  // one copy of the sigmoid; the halves end in their places
    for (int e = 0; e < 2; ++e, a >>= 16, u >>= 16)
      o = __byte_perm(o, to_bf16((low_bf16(a) * r) * sigmoid_of(low_bf16(u))), 0x5432);
    return o;
  }
};

}  // namespace muse
