#include "ffi/ops/head/head.h"

#include "ffi/comm/pool.h"
#include "ffi/ops/gemm/gemm.h"
#include "ffi/ops/head/row.h"

namespace muse {
namespace {

MUSE_CLONES void softcap(float* logits, int64_t n, float multiplier, float cap) {
  for (int64_t i = 0; i < n; ++i) logits[i] = softcap_logit(logits[i], multiplier, cap);
}

MUSE_CLONES float row_log_prob(const float* logits, int64_t n, int64_t token) { return log_prob_row(logits, n, token); }

}  // namespace

Status head(Stream stream, Head op, const uint16_t* h, const uint16_t* w, float* logits) {
  const Status status = gemm(stream, {op.rows, op.vocabulary, op.hidden, false}, h, w, logits);
  if (!status.ok()) return status;
  parallel_for(op.rows, [&](int64_t t) { softcap(logits + t * op.vocabulary, op.vocabulary, op.multiplier, op.cap); });
  return {};
}

Status log_prob(Stream, int64_t rows, int64_t vocabulary, const float* logits, const int32_t* token, float* result) {
  parallel_for(rows, [&](int64_t t) { result[t] = row_log_prob(logits + t * vocabulary, vocabulary, token[t]); });
  return {};
}

}  // namespace muse
