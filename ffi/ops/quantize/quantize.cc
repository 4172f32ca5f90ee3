#include "ffi/ops/quantize/quantize.h"

#include <algorithm>
#include <vector>

#include "ffi/comm/pool.h"
#include "ffi/ops/quantize/row.h"

namespace muse {
namespace {

MUSE_CLONES void activation_row(const uint16_t* x, int64_t n, float scale, uint8_t* packed, uint8_t* scales) {
  quantize_row(x, n, scale, packed, scales);
}
MUSE_CLONES void weight_row(const uint16_t* w, int64_t n, float scale, uint8_t* packed, uint8_t* scales) {
  quantize_weight_row(w, n, scale, packed, scales);
}
MUSE_CLONES uint16_t largest(const uint16_t* w, int64_t n) { return largest_magnitude(w, n); }

}  // namespace

Status quantize(Stream, int64_t rows, int64_t inner, const uint16_t* x, const float* input_scale, uint8_t* codes,
                uint8_t* scales) {
  parallel_for(rows, [&](int64_t row) {
    activation_row(x + row * inner, inner, *input_scale, codes + row * inner / 2, scales + row * inner / 16);
  });
  return {};
}

Status quantize_weight(Stream, int64_t tensors, int64_t rows, int64_t inner, const uint16_t* w, uint8_t* codes,
                       uint8_t* scales, float* weight_scale_2) {
  std::vector<uint16_t> row_largest(tensors * rows);
  parallel_for(tensors * rows, [&](int64_t row) { row_largest[row] = largest(w + row * inner, inner); });
  for (int64_t g = 0; g < tensors; ++g) {
    const uint16_t* first = row_largest.data() + g * rows;
    const uint16_t amax = rows == 0 ? uint16_t{0} : *std::max_element(first, first + rows);
    weight_scale_2[g] = !bf16_finite(amax) ? nan32() : amax == 0 ? 1.0f : from_bf16(amax) / 2688.0f;
  }
  parallel_for(tensors * rows, [&](int64_t row) {
    if (is_nan(weight_scale_2[row / rows])) {
      memset(codes + row * inner / 2, 0, inner / 2);
      memset(scales + row * inner / 16, kNan8, inner / 16);
      return;
    }
    weight_row(w + row * inner, inner, weight_scale_2[row / rows], codes + row * inner / 2, scales + row * inner / 16);
  });
  return {};
}

}  // namespace muse
