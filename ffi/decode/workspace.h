// The symmetric workspace of one rank: its own scratch, and the slots into which the other ranks store. Every rank's
// has the same layout, so an offset and a base pointer address any rank's.
//
// Slots hold 64-bit words: 32 bits of data and the 32-bit epoch of the exchange, stored together, so the data is its
// own flag: no separate flag, no reset. Sums of squares of a stream's unit are flags of the unit too: fences on both
// sides.
//
// Why a slot is not written again before it is read (who waits for an epoch would wait for ever). A rank's blocks do
// not meet within a layer. At two points a block only says that it came (arrive, sync.cuh): H behind the head norms, R
// behind routing. Nobody waits for the others there; but before a block stores o_proj's partial sums it waits until all
// of its rank came to H, and before the experts' outputs until all came to R. A word that was looked at and found to be
// there has been read: what depends on it, and what lies behind the block's next meeting, comes later. So a block that
// came to a point has read all that it waited for before. Two facts about all ranks:
// 1. Whoever has waited for row_sums[0] knows that all blocks of all ranks came to H of this layer: these sums were
// made
//    of every rank's branch[0], each word of that of partial[0] of every rank, and no block stores such a sum before
//    all of its rank came to H. Every block waits so in pre_expert_proj's operand, before it stores anything of what
//    follows: P.
// 2. Whoever has waited for a pair's sums of squares, of every rank, knows that all blocks of all ranks came to R of
// this
//    layer: they were made of outputs of every rank, and no block stores one before all of its rank came to R. So does
//    who has waited for what was made of such sums: every block in post_expert_proj's operand, for the weighted sum,
//    before it stores anything of what follows: S.
//
//   slot                              last read before    next write                      by
//   head_sums, q, k, v, stretch_sums,
//     o, row_sums[0], pool_sums       R, own rank         next layer, behind S            2
//   partial[0], branch[0]             R                   next layer, behind S            2
//   logits, pooled                    R                   next layer, behind S            2
//   router_*, x                       the next H, own     next layer, behind P            1
//   hidden, sums                      the next H          next layer, behind P            1
//   f, combined                       the next H, own     next layer, behind P            1
//   partial[1], branch[1]             the next H          next layer, behind P            1
//   row_sums[1]                       the next H, own     next layer, behind P            1
//
// "The next H" of a launch's last layer is its end, where the rank's blocks meet; a rank's own slots need no more than
// that. What a next launch stores elsewhere before its first P is in this table too: behind the last S of this one.
// start() uses branch[0] in an epoch of its own; it is written again in reduce(0), which has waited for o_proj's sums
// of every rank, stored behind H; row_sums[1] likewise, by 1. A layer's epoch begins behind the head norms, who store
// in it already; head_sums carry the epoch of the layer before, as the row_sums that q, k, v and u waited for.
//
// The stream is scratch of the rank: a block reads it behind row_sums, with fences on both sides, before H and before
// R, and writes it behind branch[0], which by the first half of 1 is behind H of its rank, and behind S.
#pragma once

#include "ffi/decode/plan.h"
#include "ffi/numerics/reduce.h"

namespace muse {

constexpr int kMaxPairsLog2 = 10;
constexpr int64_t kMaxPairs = 1 << kMaxPairsLog2;
static_assert(kMaxPairs == kMaxRows * kMaxTopK);
// Operands of experts, pooled rows and hidden rows, travel as the B operands of m16n8k16 that they will be, registers 0
// and 1 of its lanes 4 g + t: a piece of eight slot words, 2 t and 2 t + 1 for lane t, is a 16-block of bf16, a
// register a word; or two 16-blocks of codes with their scales (code_bits), a word each.
constexpr int64_t kPieceWords = 8;

constexpr int64_t kBestWords = 2;  // a rank's best logit of a row and its token id
constexpr int64_t kHeadRows = 16;  // rows whose logits are summed at once

// One per rank, at the start of its workspace. A launch changes `epoch` and `base` at its very end, when all its blocks
// have read them.
struct Control {
  uint32_t epoch;    // exchanges of earlier launches are older than this
  uint32_t barrier;  // arrivals of the rank's blocks, ever
  uint32_t base;     // those of earlier launches
  uint32_t abort;    // set at every rank by whoever gives up; everyone who waits or starts looks at it
};

// Why a kernel gave up, one per rank, in host memory that the device writes. code 0: it did not.
enum ReportCode : uint32_t { kFine = 0, kTimedOut, kBadRows };

enum class Phase : uint32_t { kEmbed, kAttention, kOutput, kBranch, kRouter, kExperts, kHidden, kCombine, kEnd, kHead };

struct Report {
  volatile ReportCode code;
  volatile uint32_t layer;
  volatile Phase phase;
  volatile uint32_t source;  // the rank that was waited for, or the row that is wrong
};

// Sums of attention, of a chunk or of a stretch of 2048 positions for one row and kv head, that fit the scratch at
// once: 16 rows of two heads at a million positions by stretches. Of each query head the numerators and the
// denominator, padded so that pairs of slots are aligned.
constexpr int64_t kAttentionSums = 17408;
constexpr int kSumWidth = kHeadDim + 2;

// Builds with MUSE_TIMELINE stamp the clock between phases: events of a block in one launch, at most.
constexpr int64_t kTimelineBlocks = 132, kTimelineEvents = 4096;

struct Workspace {
  // what the head call uses too: its offsets depend on the hidden size alone
  int64_t h, best, segment_sums;
  // scratch
  int64_t stream;
  // slots, [source rank][...]
  int64_t partial[2], branch[2], logits, pooled, hidden, sums;
  // slots that the rank itself fills
  int64_t row_sums[2];                     // [row][segment]
  int64_t stretch_sums;                    // attention's parts (attention_steps.cuh)
  int64_t q, k, v, o;                      // heads and attention's rows: [row][pair of columns]
  int64_t router_weights, router_experts;  // [row][slot]
  int64_t x;                               // the experts' operand: [row][segment][piece]
  int64_t f;                               // the experts' outputs: [row and slot][pair of columns]
  int64_t combined;                        // [row][pair of columns]
  int64_t head_sums, pool_sums;            // [segment][row][column of q, k, v and u, of the pooled rows]
  int64_t timeline;                        // [block][event]
  int64_t bytes;
};

MUSE_FN Workspace workspace_of(const Plan& p) {
  Workspace w{};
  int64_t at = 256;  // Control
  const auto take = [&at](int64_t bytes) {
    const int64_t offset = at;
    at += (bytes + 255) / 256 * 256;
    return offset;
  };
  const int64_t rows = kMaxRows, pairs = rows * p.top_k, group = p.kv_heads ? p.q_heads / p.kv_heads : 0;
  w.h = take(rows * p.hidden * 2);
  w.best = take(2 * kRanks * rows * kBestWords * 8);  // by parity of the epoch: two head calls may follow each other
  w.segment_sums = take(kSegments * 4 * kHeadRows * 16 * p.head_groups());
  w.stream = take(rows * p.hidden * 4);
  for (int i = 0; i < 2; ++i) {
    w.partial[i] = take(kRanks * rows * (p.hidden / kRanks) * 8);
    w.branch[i] = take(kRanks * rows * (p.hidden / kRanks / 2) * 8);
    w.row_sums[i] = take(rows * kSegments * 8);
  }
  w.logits = take(kRanks * rows * p.experts_rank() * kSegments * 8);
  w.pooled = take(kRanks * rows * (p.moe_columns() / 2) * 8);
  w.hidden = take(kRanks * pairs * (p.inner_columns() / 16) * kPieceWords * 8);
  w.sums = take(kRanks * pairs * 8);
  w.stretch_sums = take(kAttentionSums * group * kSumWidth * 8);
  w.q = take(rows * (p.q_columns() / 2) * 8);
  w.k = take(rows * (p.kv_columns() / 2) * 8);
  w.v = take(rows * (p.kv_columns() / 2) * 8);
  w.o = take(rows * (p.q_columns() / 2) * 8);
  w.router_weights = take(pairs * 8);
  w.router_experts = take(pairs * 8);
  w.x = take(rows * (p.moe_hidden / 16) * kPieceWords * 8);
  w.f = take(pairs * (p.moe_columns() / 2) * 8);
  w.combined = take(rows * (p.moe_columns() / 2) * 8);
  w.head_sums = take(kSegments * rows * p.qkvu_rows() * 8);
  w.pool_sums = take(kSegments * rows * p.moe_columns() * 8);
#ifdef MUSE_TIMELINE
  w.timeline = take(kTimelineBlocks * kTimelineEvents * 8);
#endif
  w.bytes = at;
  return w;
}

}  // namespace muse
