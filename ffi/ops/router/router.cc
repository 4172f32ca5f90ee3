#include "ffi/ops/router/router.h"

#include <vector>

#include "ffi/comm/pool.h"
#include "ffi/ops/router/row.h"

namespace muse {
namespace {

static_assert(kRouterMaxSlots == kMaxSlots);

MUSE_CLONES void one_row(const Router& op, const uint16_t* h, const float* w, const float* bias, int64_t row,
                         int32_t* experts, float* weights, float* logits) {
  std::vector<float> dots(op.experts);
  for (int64_t e = 0; e < op.experts; ++e) dots[e] = dot(op.hidden, h + row * op.hidden, w + e * op.hidden);
  route_row(dots.data(), bias, op.experts, op.slots, op.multiplier, op.scaling, experts + row * op.slots,
            weights + row * op.slots, logits + row * op.experts);
}

}  // namespace

Status router(Stream, Router op, const uint16_t* h, const float* w, const float* bias, int32_t* experts, float* weights,
              float* logits) {
  parallel_for(op.rows, [&](int64_t row) { one_row(op, h, w, bias, row, experts, weights, logits); });
  return {};
}

}  // namespace muse
