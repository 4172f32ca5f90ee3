// The NVFP4 quantisers (docs/numerics.md 8).
#pragma once

#include "ffi/ops/launch.h"

namespace muse {

// x bf16 [rows, inner] -> codes [rows, inner / 2] and scales [rows, inner / 16].
Status quantize(Stream stream, int64_t rows, int64_t inner, const uint16_t* x, const float* input_scale, uint8_t* codes,
                uint8_t* scales);

// w bf16 [tensors, rows, inner]: each tensor has its own weight_scale_2. A weight that is not finite gives its tensor
// weight_scale_2 NaN, scales 0x7F and codes 0: an error on one device would leave the others waiting for it.
Status quantize_weight(Stream stream, int64_t tensors, int64_t rows, int64_t inner, const uint16_t* w, uint8_t* codes,
                       uint8_t* scales, float* weight_scale_2);

}  // namespace muse
