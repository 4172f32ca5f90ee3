// Where attention's chains restart (docs/numerics.md 7, Attention 6).
#pragma once

#include <cstdint>

namespace muse {

constexpr int64_t kChunk = 128, kSuperChunk = 2048;

}  // namespace muse
