// The fp16 numbers that the router's steps use, by compiler type _Float16, which rounds once per operation.
#pragma once

#include "cuda_runtime.h"

struct __half {
  _Float16 value;
};
struct __half2 {
  _Float16 x, y;
};

inline __half __float2half_rn(float v) { return {static_cast<_Float16>(v)}; }
inline uint16_t __half_as_ushort(__half v) {
  uint16_t bits;
  memcpy(&bits, &v, sizeof(bits));
  return bits;
}
inline __half __low2half(__half2 v) { return {v.x}; }
inline __half __high2half(__half2 v) { return {v.y}; }
inline __half2 __half2half2(__half v) { return {v.value, v.value}; }
inline __half2 __hmul2(__half2 a, __half2 b) {
  return {static_cast<_Float16>(a.x * b.x), static_cast<_Float16>(a.y * b.y)};
}
