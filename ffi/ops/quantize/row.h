// Rows of codes (docs/numerics.md 8).
#pragma once

#include "ffi/numerics/formats.h"

namespace muse {

// Two codes per byte, element 2j in the low nibble.
MUSE_FN void pack_block(const uint8_t* codes, uint8_t* packed) {
  for (int j = 0; j < 8; ++j) packed[j] = static_cast<uint8_t>(codes[2 * j] | codes[2 * j + 1] << 4);
}

MUSE_FN void quantize_row(const uint16_t* x, int64_t n, float input_scale, uint8_t* packed, uint8_t* scales) {
  uint8_t codes[16];
  for (int64_t b = 0; b < n / 16; ++b) {
    scales[b] = quantize_block(x + 16 * b, input_scale, codes);
    pack_block(codes, packed + 8 * b);
  }
}

MUSE_FN void quantize_weight_row(const uint16_t* w, int64_t n, float weight_scale_2, uint8_t* packed, uint8_t* scales) {
  uint8_t codes[16];
  for (int64_t b = 0; b < n / 16; ++b) {
    scales[b] = quantize_weight_block(w + 16 * b, weight_scale_2, codes);
    pack_block(codes, packed + 8 * b);
  }
}

// The largest magnitude's bf16 bits; from 0x7F80 on something was not finite.
MUSE_FN uint16_t largest_magnitude(const uint16_t* w, int64_t n) {
  uint16_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint16_t a = w[i] & 0x7FFFu;
    largest = a > largest ? a : largest;
  }
  return largest;
}

}  // namespace muse
