#include "ffi/ops/combine/combine.h"

#include <vector>

#include "ffi/comm/pool.h"
#include "ffi/ops/combine/row.h"
#include "ffi/ops/norm/row.h"

namespace muse {
namespace {

MUSE_CLONES void one_row(const Combine& op, const uint16_t* f, const float* weights, const int32_t* experts,
                         const uint16_t* gain, int64_t row, uint16_t* x) {
  combine_row(f + row * op.slots * op.columns, weights + row * op.slots, experts + row * op.slots, op.slots, gain,
              op.columns, op.eps, x + row * op.columns);
}

}  // namespace

Status combine(Stream, Combine op, const uint16_t* f, const float* weights, const int32_t* experts,
               const uint16_t* gain, uint16_t* x) {
  std::vector<uint16_t> effective(op.columns);
  for (int64_t i = 0; i < op.columns; ++i) effective[i] = effective_gain(gain[i]);
  parallel_for(op.rows, [&](int64_t row) { one_row(op, f, weights, experts, effective.data(), row, x); });
  return {};
}

}  // namespace muse
