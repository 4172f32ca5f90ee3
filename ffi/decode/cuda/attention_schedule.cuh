// Who attends to what, found once per launch: the rows of each sequence, and how a layer's work is cut into units.
//
// Chunks of 128 positions that are all committed lie in the same cache slots for every row of a sequence, so a unit of
// them is a kv head, a run of chunks and a group of rows: each key and value is loaded once for the group. The at most
// two chunks with positions in flight, whose slots differ from row to row, are units of one row each.
//
// A unit leaves sums per row and head, a part each: of every chunk, or of every stretch of 2048 positions, or (where
// the scratch does not hold so many) of all full stretches and of the rest.
#pragma once

#include "ffi/decode/cuda/rows.cuh"
#include "ffi/decode/cuda/schedule.h"
#include "ffi/decode/workspace.h"

namespace muse {

constexpr int kChunk = 128, kChunkLog2 = 7;     // positions
constexpr int kStretch = 16, kStretchLog2 = 4;  // chunks
constexpr int kWholeRun = 30;                   // log2 of the chunks of a unit that takes all
constexpr int kUnitRowsLog2 = 3;                // rows of a unit, at most

// A sequence's chunks in a layer: committed ones [first, own), then each row's own [own, last].
struct SequenceChunks {
  int first, own, last;

  __device__ int runs(int run) const { return own > first ? ((own - 1) >> run) - (first >> run) + 1 : 0; }
  // Sums of the committed chunks that a row and head keeps.
  __device__ int shared_parts(int run) const {
    if (own == first || run < kStretchLog2) return own - first;
    return run == kStretchLog2
               ? runs(run)
               : (own >> kStretchLog2 > first >> kStretchLog2) + (static_cast<uint32_t>(own) % kStretch != 0);
  }
  __device__ int parts(int run) const { return shared_parts(run) + last - own + 1; }
};

// Which of a row's parts end a stretch.
struct StretchEnds {
  int whole, behind;  // the parts of whole stretches; chunks behind a part, of those that are chunks
  __device__ StretchEnds(const SequenceChunks& c, int run) {
    const int shared = c.shared_parts(run);
    whole = run >= kStretchLog2 ? shared - 1 : 0;
    behind = c.own + 1 - shared;
  }
  __device__ bool after(int part) const { return part < whole || static_cast<uint32_t>(behind + part) % kStretch == 0; }
};

struct SequenceRows {
  uint8_t begin, count;                // in AttentionSchedule::member
  int32_t committed, lowest, highest;  // chunks committed; positions of the rows

  __device__ SequenceChunks chunks(int window) const {
    const int first = max(lowest - window + 1, 0) >> kChunkLog2;
    return {first, max(first, committed), highest >> kChunkLog2};
  }
};

// Which slot of a layer's cache a position has: in a sliding layer one of a ring's.
struct CacheSlots {
  Divisor ring;  // none in a full layer
  // Positions may be past its exact range: the quotient is right or one too large.
  __device__ int of(int position) const {
    const int rest = position - ring.quotient(position) * ring.value;
    return rest < 0 ? rest + ring.value : rest;
  }
};

// Units and sums of the sequences before each, for the layers of one kind.
struct LayerUnits {
  int32_t run, group;  // log2 of a unit's chunks, aligned, and rows
  int32_t window;
  CacheSlots slots;
  int32_t units;
  int32_t unit[kMaxRows], sum[kMaxRows];
};

struct AttentionSchedule {
  uint8_t member[kMaxRows];  // rows by sequence
  uint8_t of[kMaxRows];      // a row's sequence
  int32_t sequences;
  int32_t kv_heads, group;  // of the rank, and query heads of each
  Divisor by_heads;         // kv_heads
  float scale;              // of scores
  SequenceRows sequence[kMaxRows];
  LayerUnits kind[2];  // sliding, full
};

struct UnitCounts {
  int shared, own, sums;
};
__device__ inline UnitCounts count_units(const SequenceRows& s, const SequenceChunks& c, int run, int group,
                                         int heads) {
  return {c.runs(run) * heads * ((s.count + (1 << group) - 1) >> group), (c.last - c.own + 1) * heads * s.count,
          c.parts(run) * heads * s.count};
}

// What a run and a group cost, in tenths of a microsecond, roughly: a unit's latency, a chunk's, that of two rows in a
// chunk, and of adding up parts.
__device__ inline uint32_t unit_cost(const AttentionSchedule& a, int run, int group, int window, int heads,
                                     int blocks) {
  constexpr int kUnit = 30, kOneChunk = 5, kTwoRows = 4;
  constexpr uint32_t kNever = (1u << 26) - 1;
  int total = 0, longest = 0, sums = 0, parts = 0, rows = 0;
#pragma unroll 1
  for (int i = 0; i < a.sequences; ++i) {
    const SequenceRows& s = a.sequence[i];
    const SequenceChunks c = s.chunks(window);
    const UnitCounts n = count_units(s, c, run, group, heads);
    const int cost =
        kUnit + min(c.own - c.first, 1 << run) * (kOneChunk + kTwoRows * (min(s.count + 1, 1 << group) / 2));
    total += n.shared * cost + n.own * (kUnit + kOneChunk + kTwoRows);
    longest = max(longest, cost);
    sums += n.sums;
    parts = max(parts, c.parts(run));
    rows += s.count;
  }
  if (sums > kAttentionSums) return kNever;
  return min(kNever,
             static_cast<uint32_t>(total / blocks + longest + parts * ((rows * heads + blocks - 1) / blocks) / 2));
}

// By all computing threads; the rows are right.
inline __device__ __noinline__ void schedule_attention(const Plan& plan, const DeviceRows& rows, int blocks,
                                                       AttentionSchedule& a) {
  const int t = thread_index(), lane = t % 32;
  if (t < rows.count) {
    const int sequence = rows.sequence[t];
    int place = 0, ordinal = 0, count = 0, lowest = rows.position[t], highest = lowest;
#pragma unroll 1
    for (int u = 0; u < rows.count; ++u) {
      const int other = rows.sequence[u];
      place += other < sequence || (other == sequence && u < t);
      ordinal += other < sequence && rows.index[u] == 0;
      if (other != sequence) continue;
      ++count;
      lowest = min(lowest, rows.position[u]);
      highest = max(highest, rows.position[u]);
    }
    a.member[place] = static_cast<uint8_t>(t);
    a.of[t] = static_cast<uint8_t>(ordinal);
    if (rows.index[t] == 0)
      a.sequence[ordinal] = {static_cast<uint8_t>(place), static_cast<uint8_t>(count), rows.committed[t] >> kChunkLog2,
                             lowest, highest};
    if (place == rows.count - 1) a.sequences = ordinal + 1;
  }
  if (t == 0) {
    a.kv_heads = static_cast<int>(plan.kv_rank());
    a.group = static_cast<int>(plan.q_heads / plan.kv_heads);
    a.by_heads = divisor(a.kv_heads);
    a.scale = plan.score_scale;
  }
  sync_block();
  if (t < 64) {  // a warp per kind of layer, a lane per way to cut
    LayerUnits& kind = a.kind[t / 32];
    const bool full = t / 32 == 1;
    const int window = full ? 0x7FFFFFFF : static_cast<int>(plan.window), heads = static_cast<int>(plan.kv_rank());
    int run = lane % (kStretchLog2 + 2), group = 1 + lane / (kStretchLog2 + 2);
    if (run > kStretchLog2) run = kWholeRun;
    const uint32_t cost = group <= kUnitRowsLog2 ? unit_cost(a, run, group, window, heads, blocks) : (1u << 26) - 1;
    const int best = static_cast<int>(__reduce_min_sync(~0u, cost << 5 | lane) % 32);
    run = __shfl_sync(~0u, run, best);
    group = __shfl_sync(~0u, group, best);
    if (lane == 0) {
      int units = 0, sums = 0;
#pragma unroll 1
      for (int i = 0; i < kMaxRows; ++i) {
        kind.unit[i] = i < a.sequences ? units : 0x7FFFFFFF;
        kind.sum[i] = sums;
        if (i >= a.sequences) continue;
        const UnitCounts n = count_units(a.sequence[i], a.sequence[i].chunks(window), run, group, heads);
        units += n.shared + n.own;
        sums += n.sums;
      }
      kind.run = run;
      kind.group = group;
      kind.window = window;
      kind.slots = {divisor(full ? 0 : static_cast<int>(plan.ring))};
      kind.units = units;
    }
  }
  sync_block();
}

}  // namespace muse
