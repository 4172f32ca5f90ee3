#include "ffi/ops/gemm/gemm.h"

#include "ffi/comm/pool.h"
#include "ffi/ops/gemm/column_group.h"

namespace muse {
namespace {

// Sixteen columns of y for every row.
template <typename Weights>
MUSE_FN void column_group(const GemmShape& s, const typename Weights::Row* const* rows, const Weights& weights,
                          int64_t n0, void* y) {
  std::vector<float> sums(s.rows * kLanes);
  column_sums(weights, s.inner, n0, s.columns, rows, s.rows, sums.data());
  for (int64_t t = 0; t < s.rows; ++t)
    for (int n = 0; n < kLanes && n0 + n < s.columns; ++n) {
      const float value = sums[t * kLanes + n];
      const int64_t at = t * s.columns + n0 + n;
      if (s.bf16_result)
        static_cast<uint16_t*>(y)[at] = to_bf16(value);
      else
        static_cast<float*>(y)[at] = value;
    }
}

// target_clones does not apply to templates: one named function per kind.
MUSE_CLONES void group(const GemmShape& s, const RowBlock* const* x, const Bf16Weights& w, int64_t n0, void* y) {
  column_group(s, x, w, n0, y);
}
MUSE_CLONES void group(const GemmShape& s, const RowBlock* const* x, const W4A16Weights& w, int64_t n0, void* y) {
  column_group(s, x, w, n0, y);
}
MUSE_CLONES void group(const GemmShape& s, const CodeRow* const* x, const W4A4Weights& w, int64_t n0, void* y) {
  column_group(s, x, w, n0, y);
}

MUSE_CLONES void load(const uint16_t* x, int64_t row, int64_t inner, RowBlock* out) {
  load_row(x + row * inner, inner, out);
}
MUSE_CLONES void load(Nvfp4 x, int64_t row, int64_t inner, CodeRow* out) { load_row(x, row, inner, out); }

template <typename Weights, typename X>
void run(const GemmShape& s, X x, const Weights& weights, void* y) {
  const int64_t blocks = s.inner / kBlock;
  std::vector<typename Weights::Row> storage(s.rows * blocks);
  std::vector<const typename Weights::Row*> rows(s.rows);
  parallel_for(s.rows, [&](int64_t t) {
    rows[t] = &storage[t * blocks];
    load(x, t, s.inner, &storage[t * blocks]);
  });
  const int64_t groups = (s.columns + kLanes - 1) / kLanes;
  parallel_for(groups, [&](int64_t g) { group(s, rows.data(), weights, g * kLanes, y); });
}

}  // namespace

Status gemm(Stream, GemmShape s, const uint16_t* x, const uint16_t* w, void* y) {
  run(s, x, Bf16Weights{w}, y);
  return {};
}

Status gemm_w4a16(Stream, GemmShape s, const uint16_t* x, Nvfp4 w, const float* weight_scale_2, void* y) {
  run(s, x, W4A16Weights{w, *weight_scale_2}, y);
  return {};
}

Status gemm_w4a4(Stream, Scratch*, GemmShape s, Nvfp4 x, Nvfp4 w, const float* weight_scale_2, const float* input_scale,
                 void* y) {
  run(s, x, W4A4Weights{w, *weight_scale_2 * *input_scale}, y);
  return {};
}

}  // namespace muse
