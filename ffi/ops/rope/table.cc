#include "ffi/ops/rope/table.h"

#include <cmath>

#include "ffi/numerics/rope.h"

namespace muse {

void rope_table(int64_t positions, double theta, float* table) {
  float frequency[32];
  for (int i = 0; i < 32; ++i) frequency[i] = 1.0f / static_cast<float>(std::pow(theta, 2 * i / 64.0));
  for (int64_t p = 0; p < positions; ++p)
    for (int i = 0; i < 32; ++i)
      cos_sin(static_cast<float>(p) * frequency[i], &table[64 * p + i], &table[64 * p + 32 + i]);
}

}  // namespace muse
