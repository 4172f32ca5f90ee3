// Compiler differences, in one place. MUSE_FN marks a contract function usable on host and device.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define MUSE_FN __host__ __device__ __forceinline__
#else
#define MUSE_FN inline __attribute__((always_inline))
#endif

// Host loops that carry the arithmetic are compiled for several x86 levels and chosen at load time; every level gives
// the same bits, because the contract's operations are exact or individually rounded. Other processors (and compilers
// without ifunc) take the one portable version.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#define MUSE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MUSE_CLONES
#endif

namespace muse {

template <typename To, typename From>
MUSE_FN To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// fma(a, b, c) rounded once; the build sets -ffp-contract=off / --fmad=false, so nothing else ever becomes an fma.
MUSE_FN float fma1(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

MUSE_FN float sqrt1(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

}  // namespace muse
