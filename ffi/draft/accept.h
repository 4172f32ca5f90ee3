// What becomes of verified trees: the path that the target itself would have taken, and the caches after it.
#pragma once

#include <cstdint>

#include "ffi/ops/launch.h"

namespace muse {

constexpr int kMaxTreeRows = 64;   // of all trees together: what a step has
constexpr int kMaxTapLayers = 32;  // that a draft sees
constexpr int kCaches = 4;         // keys and values of full layers, of sliding layers
constexpr int kCacheRow = 64;      // numbers of a position, layer and head

struct AcceptCall {
  int64_t batch, width, capacity;
  // The trees [B, W], what the target put behind each node and whether it could not say, and who takes part [B].
  const int32_t *token, *parent, *chosen, *lengths;
  const bool *nan, *active;
  // Each [ranks, layers, B, heads, slots, 64], updated in place.
  uint16_t* cache[kCaches];
  int64_t ranks, heads, layers[kCaches], slots[kCaches];
  // The stream of the layers [layers, 2, B W, H], of which the draft sees some; null where it sees none.
  const float* residuals;
  int64_t hidden, taps;
  int32_t tap[kMaxTapLayers];
  // [B, W]: the nodes of the path by depth (behind its end 0), what follows each, the path's own tokens.
  int32_t *path, *follows, *seen;
  // [B]: nodes of the path, new tokens, the last of them, the length after it.
  int32_t *committed, *count, *next, *grown;
  bool* ended;         // [B]: the target could not say what follows the path
  uint16_t* features;  // bf16 [B, W, taps, H]: the path's rows of the stream
};

Status accept(Stream stream, const AcceptCall& call);

}  // namespace muse
