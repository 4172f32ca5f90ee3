// Attention of a layer: head norms and cache, attention itself, its gate.
#pragma once

#include "ffi/decode/cuda/attention.cuh"
#include "ffi/decode/cuda/rows_steps.cuh"

namespace muse {

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
      store_head(w_.q, i * q_heads() + head, pair);
    else
      cache(l, i, head - q_heads(), pair, value);
  }

  // The units of attention_schedule.cuh.
  __device__ void attend_rows() {
    const int l = layer();
#pragma unroll 1
    for (int unit = block(); unit < s_.attention.kind[p_.kind[l].full].units; unit += blocks()) {
      run_phase<&AttentionSteps::begin_unit>(unit);
      attend(unit);
    }
  }

  // Each row and kv head by whichever block it falls to, as soon as its sums are there.
  __device__ void finish_rows() {
    const LayerUnits& kind = s_.attention.kind[p_.kind[layer()].full];
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
    const int position = s_.rows.committed[i] + s_.rows.index[i],
              slot = full ? position : position % static_cast<int>(p_.ring);
    const int64_t at = p_.cache(l, s_.rows.sequence[i], head, slot);
    reinterpret_cast<uint32_t*>((full ? weights().k_full : weights().k_ring) + at)[lane] = key;
    reinterpret_cast<uint32_t*>((full ? weights().v_full : weights().v_ring) + at)[lane] = value;
  }

  // Where the sums of a row and head begin; the parts follow each other.
  __device__ uint64_t* sums_of(const LayerUnits& kind, int sequence, int index, int head, int parts) const {
    const int at = kind.sum[sequence] + (index * s_.attention.kv_heads + head) * parts;
    return mine<uint64_t>(w_.stretch_sums) + int64_t{at} * (s_.attention.group * kSumWidth);
  }

  // A unit of attention_schedule.cuh: what it attends to, and where in its sequence's units it stands.
  struct UnitPlace {
    AttentionUnit unit;
    SequenceChunks chunks;
    int sequence, row, major, head;
    bool own;  // of one row, with positions in flight
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
    const int minor = own ? s.count : groups, index = own ? local - shared_units : local, of_kv = index / minor,
              of_group = index - of_kv * minor, major = of_kv / kv_heads, head = of_kv - major * kv_heads;
    const int row = own ? of_group : of_group << kind.group;
    const uint8_t* member = s_.attention.member + s.begin + row;
    const int lowest = own ? s_.rows.position[*member] : s.lowest;
    const int64_t base = p_.cache(l, s_.rows.sequence[*member], head, 0);
    return {{s_.attention, kind, member, own ? 1 : min(s.count - row, 1 << kind.group),
             own ? c.own + major : max(c.first, ((c.first >> run) + major) << run),
             own ? c.own + major + 1 : min(c.own, ((c.first >> run) + major + 1) << run),
             max(lowest - kind.window + 1, 0), global(full ? weights().k_full : weights().k_ring) + base,
             global(full ? weights().v_full : weights().v_ring) + base},
            c,
            sequence,
            row,
            major,
            head,
            own};
  }

  // The A operands of a unit's rows: block b holds (head g, dimensions 16 b + 4 t to + 3) of two rows.
  __device__ __forceinline__ void load_queries(const AttentionUnit& u, int head) {
    AttentionShared& shared = *region<AttentionShared>();
    const int warp = warp_index(), lane = lane_index(), b = warp % 4, g = lane / 4, t = lane % 4,
              group = s_.attention.group;
    const int first = warp / 4;  // the warp's tiles: this one and, if there is one, that after the next
    if (2 * first >= u.rows) return;
    uint32_t two[8] = {};  // of two rows, then of the other tile's; of the last one again where there is none
    const auto slot = [&](int e) {
      const int i = u.member[min(2 * first + e / 4 * 4 + e / 2 % 2, u.rows - 1)];
      const int query = (i * s_.attention.kv_heads + head) * group + min(g, group - 1);
      return mine<uint64_t>(w_.q) + (query * kHeadDim + 16 * b + 4 * t) / 2 + e % 2;
    };
    wait(Phase::kAttention, slot, [&](int) { return me(); }, two, kBarrierGrace);
#pragma unroll
    for (int e = 0; e < 8; e += 4) {
      const int tile = first + e / 2;
      if (2 * tile >= u.rows) break;
      const bool both = 2 * tile + 1 < u.rows;
      const uint4 q{two[e], both ? two[e + 2] : 0u, two[e + 1], both ? two[e + 3] : 0u};
      shared.q[tile][b][lane] = g < group ? q : uint4{0, 0, 0, 0};
    }
  }

  // Starts to bring the keys and values of a unit of one row and one chunk with positions in flight. What was committed
  // before this launch lies in the cache; the rest comes from the slots of its rows; what the row does not see is
  // zeros.
  __device__ __forceinline__ void load_own_chunk(const UnitPlace& found) {
    const AttentionUnit& u = found.unit;
    AttentionShared& shared = *region<AttentionShared>();
    auto &keys = shared.value[1 - u.begin % 2], &values = shared.value[u.begin % 2];
    const uint8_t* member = u.member - found.row;  // of the sequence
    const int i = *u.member, committed = s_.rows.committed[i], position = s_.rows.position[i], begin = u.begin * kChunk;
    const auto piece_at = [](int at) { return 8 * (at % 8 ^ at / 8 % 8); };
#pragma unroll 1
    for (int at = thread_index(); at < kChunk * 8; at += kThreads) {  // pieces of 16 bytes
      const int place = at / 8, now = begin + place;
      uint16_t *key = keys[place] + piece_at(at), *value = values[place] + piece_at(at);
      if (now >= u.first && now < committed) {
        const int from = (u.kind.ring ? now % u.kind.ring : now) * kHeadDim + at % 8 * 8;
        ptx::copy16(ptx::shared_address(key), u.k + from);
        ptx::copy16(ptx::shared_address(value), u.v + from);
      } else if (now < u.first || now > position) {
        *reinterpret_cast<uint4*>(key) = *reinterpret_cast<uint4*>(value) = uint4{0, 0, 0, 0};
      }
    }
    const int skipped = max(max(committed, u.first) - begin, 0), end = min(position + 1 - begin, kChunk);
#pragma unroll 1
    for (int at = skipped * 8 + thread_index(); at < end * 8; at += kThreads) {
      const int place = at / 8, of_row = member[s_.rows.path[i][begin + place - committed]];
      const int from = (of_row * s_.attention.kv_heads + found.head) * (kHeadDim / 2) + at % 8 * 4;
      uint32_t words[8] = {};
      wait(
          Phase::kAttention, [&](int e) { return mine<uint64_t>(e < 4 ? w_.k : w_.v) + from + e % 4; },
          [&](int) { return me(); }, words, kBarrierGrace);
      *reinterpret_cast<uint4*>(keys[place] + piece_at(at)) = {words[0], words[1], words[2], words[3]};
      *reinterpret_cast<uint4*>(values[place] + piece_at(at)) = {words[4], words[5], words[6], words[7]};
    }
  }

  // What a unit needs first, on its way or there. Apart from attend, which has no registers for what those whom it
  // called would need.
  __device__ void begin_unit(int unit) {
    const UnitPlace found = find_unit(unit);
    const AttentionUnit& u = found.unit;
    const int start = u.begin * kChunk + 16 * warp_index();
    if (found.own)
      load_own_chunk(found);
    else
      prefetch_block(u, start, block_slot(u, start), *region<AttentionShared>());
    next_values();
    load_queries(u, found.head);
    if (!found.own) return;
    ptx::wait_all_copies();
    sync_block();
  }

  __device__ __forceinline__ void attend(int unit) {
    const UnitPlace found = find_unit(unit);
    const AttentionUnit& u = found.unit;
    const SequenceChunks& c = found.chunks;
    const int run = u.kind.run, width = s_.attention.group * kSumWidth, parts = c.parts(run),
              stride = s_.attention.kv_heads * parts * width, warp = warp_index();
    const bool own = found.own, whole = run == kWholeRun && !own;
    uint64_t* out = sums_of(u.kind, found.sequence, found.row, found.head, parts);
    if (own)
      out += (c.shared_parts(run) + found.major) * width;
    else if (run <= kStretchLog2)
      out += (run == kStretchLog2 ? found.major : u.begin - c.first) * width;
    AttentionShared& shared = *region<AttentionShared>();
    AttentionSums sums{};
    KeyBlock keys;
    // The first round only loads keys: one copy of that code.
    int chunk = u.begin - 1;
    ptx::opaque(chunk);
#pragma unroll 1
    for (; chunk < u.end; ++chunk) {
      const int start = chunk * kChunk + 16 * warp, slot = block_slot(u, start + kChunk);
      const bool more = chunk + 1 < u.end, loaded = chunk >= u.begin;
      if (loaded) {
        if (more) prefetch_block(u, start + kChunk, slot, shared);
        next_values();
        score_rows(u, s_.rows, start, keys, shared);
      }
      if (more && own)
        load_keys(shared.value[chunk & 1], keys);
      else if (more)
        load_keys(u, slot, keys);
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
    const uint32_t o =
        gated(pack(to_bf16(all.x / denominator), to_bf16(all.y / denominator)), region<uint32_t>()[thread_index()]);
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
