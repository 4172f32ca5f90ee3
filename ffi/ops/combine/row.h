// One row's weighted sum of its experts' outputs (docs/numerics.md 7, MoE 5). The fused step holds a row's columns in
// eight places, hence the split: sums of squares per segment, then rho, then any range of columns.
#pragma once

#include "ffi/ops/router/row.h"

namespace muse {

// lanes(z, z) of z = f * g over one segment of n columns; gain holds the effective g.
MUSE_FN float combine_sumsq_segment(const uint16_t* f, const uint16_t* gain, int64_t n) {
  float lane[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int j = 0; j < kLanes; ++j) {
      const float z = from_bf16(f[i + j]) * from_bf16(gain[i + j]);
      lane[j] = fma1(z, z, lane[j]);
    }
  for (int j = 0; i + j < n; ++j) {
    const float z = from_bf16(f[i + j]) * from_bf16(gain[i + j]);
    lane[j] = fma1(z, z, lane[j]);
  }
  return fold_lanes(lane);
}

// rho of one slot from its eight segments' sums; n is the whole row's length M.
MUSE_FN float combine_rho(const float* segment_sums, int64_t n, float eps) {
  return inverse_rms(tree8(segment_sums), n, eps);
}

// n columns of x. f[k] and gain point at the first of these columns; order comes from expert_order.
MUSE_FN void combine_columns(const uint16_t* const* f, const float* weights, const float* rho, const int32_t* order,
                             int64_t slots, const uint16_t* gain, int64_t n, uint16_t* out) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int count = static_cast<int>(n - i < kLanes ? n - i : kLanes);
    float x[kLanes] = {}, g[kLanes] = {};
    for (int j = 0; j < count; ++j) g[j] = from_bf16(gain[i + j]);
    for (int64_t k = 0; k < slots; ++k) {
      const int32_t slot = order[k];
      const uint16_t* row = f[slot] + i;
      const float c = weights[slot], r = rho[slot];
      for (int j = 0; j < count; ++j) x[j] = fma1(c, (from_bf16(row[j]) * g[j]) * r, x[j]);
    }
    for (int j = 0; j < count; ++j) out[i + j] = to_bf16(x[j]);
  }
}

// A whole row: f [slots, n] contiguous, n a multiple of 128.
MUSE_FN void combine_row(const uint16_t* f, const float* weights, const int32_t* experts, int64_t slots,
                         const uint16_t* gain, int64_t n, float eps, uint16_t* out) {
  const uint16_t* rows[kMaxSlots];
  float rho[kMaxSlots];
  int32_t order[kMaxSlots];
  const int64_t segment = n / kSegments;
  for (int64_t k = 0; k < slots; ++k) {
    rows[k] = f + k * n;
    float sums[kSegments];
    for (int s = 0; s < kSegments; ++s)
      sums[s] = combine_sumsq_segment(rows[k] + s * segment, gain + s * segment, segment);
    rho[k] = combine_rho(sums, n, eps);
  }
  expert_order(experts, slots, order);
  combine_columns(rows, weights, rho, order, slots, gain, n, out);
}

}  // namespace muse
