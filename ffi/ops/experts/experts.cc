#include "ffi/ops/experts/experts.h"

#include <algorithm>
#include <cstring>

#include "ffi/comm/pool.h"
#include "ffi/ops/experts/row.h"
#include "ffi/ops/gemm/column_group.h"
#include "ffi/ops/quantize/row.h"

namespace muse {
namespace {

constexpr int64_t kBatchPairs = 2048;  // bounds the unpacked rows of m that are held at once

// A run of (token, slot) pairs of one local expert, in `pairs` of the batch.
struct Run {
  int64_t expert, begin, end;
};

// The three kinds of operands: how a row is unpacked, and which weights an expert has.
struct Bf16Kind {
  using Weights = Bf16Weights;
  const uint16_t *w13, *w2;
  Weights gate_up(const ExpertFfn& op, int64_t e, int half) const {
    return {w13 + (2 * e + half) * op.intermediate * op.model};
  }
  Weights down(const ExpertFfn& op, int64_t e) const { return {w2 + e * op.intermediate * op.model}; }
  MUSE_FN void load(const uint16_t* x, int64_t n, int, RowBlock* out) const { load_row(x, n, out); }
};

Nvfp4 offset(Nvfp4 w, int64_t elements) { return {w.codes + elements / 2, w.scales + elements / kBlock}; }

struct W4A16Kind {
  using Weights = W4A16Weights;
  Nvfp4Experts w;
  Weights gate_up(const ExpertFfn& op, int64_t e, int half) const {
    return {offset(w.w13, (2 * e + half) * op.intermediate * op.model), w.w13_scale_2[2 * e + half]};
  }
  Weights down(const ExpertFfn& op, int64_t e) const {
    return {offset(w.w2, e * op.intermediate * op.model), w.w2_scale_2[e]};
  }
  MUSE_FN void load(const uint16_t* x, int64_t n, int, RowBlock* out) const { load_row(x, n, out); }
};

struct W4A4Kind {
  using Weights = W4A4Weights;
  Nvfp4Experts w;
  Weights gate_up(const ExpertFfn& op, int64_t e, int half) const {
    return {offset(w.w13, (2 * e + half) * op.intermediate * op.model),
            w.w13_scale_2[2 * e + half] * w.input_scales[0]};
  }
  Weights down(const ExpertFfn& op, int64_t e) const {
    return {offset(w.w2, e * op.intermediate * op.model), w.w2_scale_2[e] * w.input_scales[1]};
  }
  // stage 0 quantises x, stage 1 quantises m.
  MUSE_FN void load(const uint16_t* x, int64_t n, int stage, CodeRow* out) const {
    uint8_t codes[kBlock];
    for (int64_t b = 0; b < n / kBlock; ++b) {
      out[b].scale = from_e4m3(quantize_block(x + b * kBlock, w.input_scales[stage], codes));
      for (int k = 0; k < kBlock; ++k) out[b].value[k] = from_e2m1(codes[k]);
    }
  }
};

// Sixteen columns of m for `count` pairs.
template <typename Weights>
MUSE_FN void gate_up_columns(const ExpertFfn& op, const Weights& gate, const Weights& up,
                             const typename Weights::Row* const* rows, int64_t count, int64_t n0, uint16_t* m) {
  std::vector<float> g(count * kLanes), u(count * kLanes);
  column_sums(gate, op.model, n0, op.intermediate, rows, count, g.data());
  column_sums(up, op.model, n0, op.intermediate, rows, count, u.data());
  for (int64_t p = 0; p < count; ++p) swiglu_row(&g[p * kLanes], &u[p * kLanes], kLanes, m + p * op.intermediate + n0);
}

// Sixteen columns of f; pair p's row of f is pairs[p].
template <typename Weights>
MUSE_FN void down_columns(const ExpertFfn& op, const Weights& down, const typename Weights::Row* const* rows,
                          const int64_t* pairs, int64_t count, int64_t n0, uint16_t* f) {
  std::vector<float> sums(count * kLanes);
  column_sums(down, op.intermediate, n0, op.model, rows, count, sums.data());
  for (int64_t p = 0; p < count; ++p)
    for (int n = 0; n < kLanes; ++n) f[pairs[p] * op.model + n0 + n] = to_bf16(sums[p * kLanes + n]);
}

// target_clones does not apply to templates: one named function per kind and stage.
#define MUSE_EXPERT_STAGES(Kind)                                                                                  \
  MUSE_CLONES void unpack(const Kind& kind, const uint16_t* x, int64_t n, int stage, Kind::Weights::Row* out) {   \
    kind.load(x, n, stage, out);                                                                                  \
  }                                                                                                               \
  MUSE_CLONES void gate_up(const ExpertFfn& op, const Kind::Weights& gate, const Kind::Weights& up,               \
                           const Kind::Weights::Row* const* rows, int64_t count, int64_t n0, uint16_t* m) {       \
    gate_up_columns(op, gate, up, rows, count, n0, m);                                                            \
  }                                                                                                               \
  MUSE_CLONES void down(const ExpertFfn& op, const Kind::Weights& weights, const Kind::Weights::Row* const* rows, \
                        const int64_t* pairs, int64_t count, int64_t n0, uint16_t* f) {                           \
    down_columns(op, weights, rows, pairs, count, n0, f);                                                         \
  }
MUSE_EXPERT_STAGES(Bf16Kind)
MUSE_EXPERT_STAGES(W4A16Kind)
MUSE_EXPERT_STAGES(W4A4Kind)
#undef MUSE_EXPERT_STAGES

// pairs of one batch, with their expert's run.
template <typename Kind>
void run_batch(const ExpertFfn& op, const Kind& kind, const typename Kind::Weights::Row* x_rows,
               const std::vector<int64_t>& pairs, const std::vector<Run>& runs, uint16_t* f) {
  using Row = typename Kind::Weights::Row;
  const int64_t x_blocks = op.model / kBlock, m_blocks = op.intermediate / kBlock;
  const int64_t first = runs.front().begin, count = runs.back().end - first;
  std::vector<const Row*> rows(count);
  for (int64_t p = 0; p < count; ++p) rows[p] = x_rows + pairs[first + p] / op.slots * x_blocks;
  std::vector<uint16_t> m(count * op.intermediate);
  parallel_for(static_cast<int64_t>(runs.size()) * m_blocks, [&](int64_t i) {
    const Run& r = runs[i / m_blocks];
    gate_up(op, kind.gate_up(op, r.expert, 0), kind.gate_up(op, r.expert, 1), &rows[r.begin - first], r.end - r.begin,
            i % m_blocks * kBlock, &m[(r.begin - first) * op.intermediate]);
  });
  std::vector<Row> m_rows(count * m_blocks);
  parallel_for(count,
               [&](int64_t p) { unpack(kind, &m[p * op.intermediate], op.intermediate, 1, &m_rows[p * m_blocks]); });
  for (int64_t p = 0; p < count; ++p) rows[p] = &m_rows[p * m_blocks];
  parallel_for(static_cast<int64_t>(runs.size()) * x_blocks, [&](int64_t i) {
    const Run& r = runs[i / x_blocks];
    down(op, kind.down(op, r.expert), &rows[r.begin - first], &pairs[r.begin], r.end - r.begin, i % x_blocks * kBlock,
         f);
  });
}

template <typename Kind>
Status run(const ExpertFfn& op, const Kind& kind, const uint16_t* x, const int32_t* experts, int64_t first,
           uint16_t* f) {
  memset(f, 0, op.tokens * op.slots * op.model * sizeof(uint16_t));
  // A counting sort of the pairs by local expert.
  const auto local = [&](int64_t pair) {
    const int64_t e = experts[pair] - first;
    return e >= 0 && e < op.local ? e : int64_t{-1};
  };
  std::vector<int64_t> ends(op.local + 1, 0);
  for (int64_t p = 0; p < op.tokens * op.slots; ++p)
    if (local(p) >= 0) ++ends[local(p) + 1];
  for (int64_t e = 0; e < op.local; ++e) ends[e + 1] += ends[e];
  std::vector<int64_t> pairs(ends[op.local]), next(ends.begin(), ends.end() - 1);
  std::vector<char> used(op.tokens, 0);
  for (int64_t p = 0; p < op.tokens * op.slots; ++p)
    if (const int64_t e = local(p); e >= 0) {
      pairs[next[e]++] = p;
      used[p / op.slots] = 1;
    }
  const int64_t blocks = op.model / kBlock;
  std::vector<typename Kind::Weights::Row> x_rows(op.tokens * blocks);
  parallel_for(op.tokens, [&](int64_t t) {
    if (used[t]) unpack(kind, x + t * op.model, op.model, 0, &x_rows[t * blocks]);
  });
  std::vector<Run> batch;
  for (int64_t e = 0; e < op.local; ++e) {
    for (int64_t begin = ends[e]; begin < ends[e + 1]; begin += kBatchPairs) {
      batch.push_back({e, begin, std::min(begin + kBatchPairs, ends[e + 1])});
      if (batch.back().end - batch.front().begin < kBatchPairs) continue;
      run_batch(op, kind, x_rows.data(), pairs, batch, f);
      batch.clear();
    }
  }
  if (!batch.empty()) run_batch(op, kind, x_rows.data(), pairs, batch, f);
  return {};
}

}  // namespace

Status expert_ffn(Stream, Scratch*, ExpertFfn op, const uint16_t* x, const int32_t* experts, const int32_t* first,
                  const uint16_t* w13, const uint16_t* w2, uint16_t* f) {
  return run(op, Bf16Kind{w13, w2}, x, experts, *first, f);
}

Status expert_ffn_nvfp4(Stream, Scratch*, ExpertFfn op, const uint16_t* x, const int32_t* experts, const int32_t* first,
                        Nvfp4Experts weights, uint16_t* f) {
  return weights.quantize_activations ? run(op, W4A4Kind{weights}, x, experts, *first, f)
                                      : run(op, W4A16Kind{weights}, x, experts, *first, f);
}

}  // namespace muse
