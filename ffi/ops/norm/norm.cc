#include "ffi/ops/norm/norm.h"

#include <vector>

#include "ffi/comm/pool.h"
#include "ffi/ops/norm/row.h"

namespace muse {
namespace {

MUSE_CLONES void one_row(const RmsNorm& op, const void* x, const uint16_t* gain, int64_t row, uint16_t* y) {
  const int64_t n = op.columns;
  uint16_t* out = y + row * n;
  if (!op.fp32_input) {
    const uint16_t* in = static_cast<const uint16_t*>(x) + row * n;
    if (op.scale_first)
      norm_row_scale_first(in, n, gain, op.eps, out);
    else
      norm_row(in, n, gain, op.eps, out);
    return;
  }
  const float* in = static_cast<const float*>(x) + row * n;
  if (!op.round_input) return norm_row(in, n, gain, op.eps, out);
  std::vector<uint16_t> rounded(n);
  for (int64_t i = 0; i < n; ++i) rounded[i] = to_bf16(in[i]);
  norm_row(rounded.data(), n, gain, op.eps, out);
}

}  // namespace

Status rms_norm(Stream, RmsNorm op, const void* x, const uint16_t* gain, uint16_t* y) {
  std::vector<uint16_t> effective;
  if (gain && op.centred) {
    effective.resize(op.columns);
    for (int64_t i = 0; i < op.columns; ++i) effective[i] = effective_gain(gain[i]);
    gain = effective.data();
  }
  parallel_for(op.rows, [&](int64_t row) { one_row(op, x, gain, row, y); });
  return {};
}

}  // namespace muse
