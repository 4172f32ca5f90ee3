// The RoPE table, built on the host (docs/numerics.md 3).
#pragma once

#include <cstdint>

namespace muse {

constexpr int64_t kMaxPositions = int64_t{1} << 20;  // as far as cos_sin is proven correctly rounded

// table [positions, 64]: 32 cosines, then 32 sines, of positions 0 .. positions-1.
void rope_table(int64_t positions, double theta, float* table);

}  // namespace muse
