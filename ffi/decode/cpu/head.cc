#include <algorithm>

#include "ffi/comm/pool.h"
#include "ffi/decode/cpu/dense.h"
#include "ffi/decode/step.h"
#include "ffi/ops/head/row.h"
#include "ffi/ops/norm/row.h"

namespace muse {
namespace {

// Final norm of the rounded stream.
MUSE_CLONES void final_norm(const float* s, int64_t n, const uint16_t* gain, float eps, uint16_t* scratch,
                            uint16_t* h) {
  for (int64_t i = 0; i < n; ++i) scratch[i] = to_bf16(s[i]);
  norm_row(static_cast<const uint16_t*>(scratch), n, gain, eps, h);
}

MUSE_CLONES void store_logits(const float* sums, const int32_t* rows, int64_t n, int64_t first, int64_t columns,
                              float multiplier, float cap, float* logits) {
  for (int64_t i = 0; i < n; ++i)
    for (int c = 0; c < kLanes && first + c < columns; ++c)
      logits[rows[i] * columns + first + c] = softcap_logit(group_sum(sums, n, i, c), multiplier, cap);
}

}  // namespace

Status decode_head_cpu(const HeadCall& call) {
  std::vector<int32_t> rows;  // active rows
  for (int64_t t = 0; t < call.rows; ++t)
    if (call.sequence[t] >= 0) rows.push_back(static_cast<int32_t>(t));
  const int64_t n = static_cast<int64_t>(rows.size()), columns = call.vocab / kRanks;
  const int64_t groups = (columns + kLanes - 1) / kLanes, blocks = call.hidden / kBlock;

  std::vector<uint16_t> h(n * call.hidden);
  parallel_for(n, [&](int64_t i) {
    std::vector<uint16_t> scratch(call.hidden);
    final_norm(call.stream + rows[i] * call.hidden, call.hidden, call.gain, call.eps, scratch.data(),
               &h[i * call.hidden]);
  });
  Operand16 operand;
  operand.load(h.data(), n, call.hidden);
  for (float* logits : call.logits) memset(logits, 0, call.rows * columns * sizeof(float));
  parallel_for(kRanks * groups, [&](int64_t item) {
    const int64_t rank = item / groups, group = item % groups;
    std::vector<float> sums(kSegments * n * kLanes);
    bf16_group(call.lm_head[rank] + group * blocks * kTile, kSegments, blocks / kSegments, operand, 0, nullptr, n,
               sums.data());
    store_logits(sums.data(), rows.data(), n, group * kLanes, columns, call.multiplier, call.cap, call.logits[rank]);
  });

  std::vector<int32_t> token(call.rows, -1);
  std::vector<uint8_t> nan(call.rows, 0);
  parallel_for(n, [&](int64_t i) {
    float best = nan32();
    int64_t index = 0;
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      const float* logits = call.logits[rank] + rows[i] * columns;
      argmax_continue(logits, columns, rank * columns, best, index);
      nan[rows[i]] |= std::any_of(logits, logits + columns, [](float x) { return is_nan(x); });
    }
    token[rows[i]] = static_cast<int32_t>(index);
  });
  for (const HeadResults& r : call.results) {
    memcpy(r.token, token.data(), call.rows * sizeof(int32_t));
    memcpy(r.nan, nan.data(), call.rows);
  }
  return {};
}

}  // namespace muse
