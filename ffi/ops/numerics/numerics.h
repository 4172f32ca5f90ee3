// The contract's functions on raw arrays, for proofs.
#pragma once

#include "ffi/ops/launch.h"

namespace muse {

// The numbers are part of the custom call's interface; muse_jax/ops/numerics.py has the same list.
enum class Function : int64_t {
  kExp = 0,
  kSigmoid,
  kSilu,
  kTanh,
  kLog,
  kRsqrt,
  kFma,         // a, b, c
  kToBf16,      // fp32 -> u16
  kFromBf16,    // u16 -> fp32
  kFromFp16,    // u16 -> fp32
  kToE4m3,      // fp32 >= 0 -> u8
  kFromE4m3,    // u8 -> fp32
  kToE2m1,      // fp32 -> u8
  kFromE2m1,    // u8 -> fp32
  kFsum16Bf16,  // acc fp32 [n], a u16 [n, 16], b u16 [n, 16] -> fp32
  kFsum16Fp16,
  kCount
};

// n results; inputs as the function takes them.
Status numerics(Stream stream, Function function, int64_t n, const void* const* inputs, void* result);

}  // namespace muse
