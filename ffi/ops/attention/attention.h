// Attention of whole sequences over contiguous keys, and the gate after it (docs/numerics.md 7, Attention 5 to 8).
#pragma once

#include "ffi/ops/launch.h"

namespace muse {

// q [batch, rows, heads, 64], k and v [batch, keys, kv_heads, 64] as cached, heads % kv_heads == 0.
struct Attention {
  int64_t batch, rows, keys, heads, kv_heads;
  float scale;
  int64_t window;  // 0: full
};

// Row t of every sequence is at position[t]; the key at index j is at position j. a is like q.
Status attention(Stream stream, Attention op, const uint16_t* q, const uint16_t* k, const uint16_t* v,
                 const int32_t* position, uint16_t* a);

// a [rows, heads, 64], u [rows, heads * 64] -> o like u.
Status attention_gate(Stream stream, int64_t rows, int64_t heads, float eps, const uint16_t* a, const uint16_t* u,
                      uint16_t* o);

}  // namespace muse
