// Canonical GEMM y = x w^T (docs/numerics.md 5), one launch function per kind of operands.
#pragma once

#include "ffi/ops/launch.h"

namespace muse {

// Row-major x [rows, inner], w [columns, inner], y [rows, columns] as bf16 bits or fp32.
struct GemmShape {
  int64_t rows, columns, inner;
  bool bf16_result;
};

struct Nvfp4 {
  const uint8_t* codes;   // two per byte
  const uint8_t* scales;  // e4m3, one per 16 elements
};

Status gemm(Stream stream, GemmShape shape, const uint16_t* x, const uint16_t* w, void* y);
Status gemm_w4a16(Stream stream, GemmShape shape, const uint16_t* x, Nvfp4 w, const float* weight_scale_2, void* y);
Status gemm_w4a4(Stream stream, Scratch* scratch, GemmShape shape, Nvfp4 x, Nvfp4 w, const float* weight_scale_2,
                 const float* input_scale, void* y);

}  // namespace muse
