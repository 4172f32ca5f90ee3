// There are always eight ranks; a mesh of 1, 2, 4 or 8 devices carries them.
#pragma once

namespace muse {

constexpr int kRanks = 8;

}  // namespace muse
