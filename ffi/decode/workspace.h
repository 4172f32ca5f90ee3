// The symmetric workspace of one rank: its own scratch, and the slots into which the other ranks store. Every rank's
// has the same layout, so an offset and a base pointer address any rank's.
//
// Slots hold 64-bit words: 32 bits of data and the 32-bit epoch of the exchange, stored together, so the data is its
// own flag: no separate flag, no fence, no reset. A slot is written again one layer later at the earliest; by then its
// reader has passed a barrier of its rank that lies behind an exchange with every other rank.
#pragma once

#include "ffi/decode/plan.h"

namespace muse {

constexpr int64_t kMaxPairs = int64_t{kMaxRows} * kMaxTopK;
constexpr int64_t kBlockWords =
    8;  // slot words of a 16-wide block of an expert's hidden row: 16 bf16, or 16 codes and a scale

constexpr int64_t kBestWords = 2;  // a rank's best logit of a row and its token id

// One per rank, at the start of its workspace. `barrier` is cleared before every launch.
struct Control {
  uint32_t epoch;    // exchanges of earlier launches are older than this
  uint32_t barrier;  // arrivals of the rank's blocks
  uint32_t abort;    // set by whoever gives up; everyone who waits looks at it
  uint32_t pad;
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

struct Workspace {
  // what the head call uses too: its offsets depend on the hidden size alone
  int64_t h, best;
  // scratch
  int64_t stream, q, k, v, u, attended, o, router_weights, router_experts, x, x_scales, hidden_rows, hidden_scales, f,
      combined;
  // slots, [source rank][...]
  int64_t partial[2], branch[2], logits, pooled, hidden, sums;
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
  const int64_t rows = kMaxRows, pairs = rows * p.top_k;
  w.h = take(rows * p.hidden * 2);
  w.best = take(2 * kRanks * rows * kBestWords * 8);  // by parity of the epoch: two head calls may follow each other
  w.stream = take(rows * p.hidden * 4);
  w.q = take(rows * p.q_columns() * 2);
  w.k = take(rows * p.kv_columns() * 2);
  w.v = take(rows * p.kv_columns() * 2);
  w.u = take(rows * p.q_columns() * 2);
  w.attended = take(rows * p.q_columns() * 2);
  w.o = take(rows * p.q_columns() * 2);
  w.router_weights = take(pairs * 4);
  w.router_experts = take(pairs * 4);
  w.x = take(rows * p.moe_hidden * 2);
  w.x_scales = take(rows * p.moe_hidden / 16 * 4);
  w.hidden_rows = take(pairs * p.moe_inner * 2);
  w.hidden_scales = take(pairs * p.moe_inner / 16 * 4);
  w.f = take(pairs * p.moe_columns() * 2);
  w.combined = take(rows * p.moe_columns() * 2);
  for (int i = 0; i < 2; ++i) {
    w.partial[i] = take(kRanks * rows * (p.hidden / kRanks) * 8);
    w.branch[i] = take(kRanks * rows * (p.hidden / kRanks / 2) * 8);
  }
  w.logits = take(kRanks * rows * p.experts_rank() * 8);
  w.pooled = take(kRanks * rows * (p.moe_columns() / 2) * 8);
  w.hidden = take(kRanks * pairs * (p.inner_columns() / 16) * kBlockWords * 8);
  w.sums = take(kRanks * pairs * 8);
  w.bytes = at;
  return w;
}

}  // namespace muse
