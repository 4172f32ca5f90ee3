#include "ffi/ops/numerics/numerics.h"

#include <algorithm>

#include "ffi/comm/pool.h"
#include "ffi/numerics/elementary.h"
#include "ffi/numerics/fsum16.h"

namespace muse {
namespace {

constexpr int64_t kPart = 4096;

MUSE_CLONES void part(Function function, int64_t begin, int64_t end, const void* const* inputs, void* result) {
  const float* x = static_cast<const float*>(inputs[0]);
  const uint16_t* x16 = static_cast<const uint16_t*>(inputs[0]);
  const uint8_t* x8 = static_cast<const uint8_t*>(inputs[0]);
  float* y = static_cast<float*>(result);
  switch (function) {
    case Function::kExp:
      for (int64_t i = begin; i < end; ++i) y[i] = canonical(exp1(x[i]));
      break;
    case Function::kSigmoid:
      for (int64_t i = begin; i < end; ++i) y[i] = canonical(sigmoid(x[i]));
      break;
    case Function::kSilu:
      for (int64_t i = begin; i < end; ++i) y[i] = canonical(silu(x[i]));
      break;
    case Function::kTanh:
      for (int64_t i = begin; i < end; ++i) y[i] = canonical(tanh1(x[i]));
      break;
    case Function::kLog:
      for (int64_t i = begin; i < end; ++i) y[i] = canonical(log1(x[i]));
      break;
    case Function::kRsqrt:
      for (int64_t i = begin; i < end; ++i) y[i] = canonical(rsqrt1(x[i]));
      break;
    case Function::kFma: {
      const float *b = static_cast<const float*>(inputs[1]), *c = static_cast<const float*>(inputs[2]);
      for (int64_t i = begin; i < end; ++i) y[i] = canonical(fma1(x[i], b[i], c[i]));
      break;
    }
    case Function::kToBf16:
      for (int64_t i = begin; i < end; ++i) static_cast<uint16_t*>(result)[i] = to_bf16(x[i]);
      break;
    case Function::kFromBf16:
      for (int64_t i = begin; i < end; ++i) y[i] = canonical(from_bf16(x16[i]));
      break;
    case Function::kFromFp16:
      for (int64_t i = begin; i < end; ++i) y[i] = canonical(from_fp16(x16[i]));
      break;
    case Function::kToE4m3:
      for (int64_t i = begin; i < end; ++i) static_cast<uint8_t*>(result)[i] = to_e4m3_sat(x[i]);
      break;
    case Function::kFromE4m3:
      for (int64_t i = begin; i < end; ++i) y[i] = canonical(from_e4m3(x8[i]));
      break;
    case Function::kToE2m1:
      for (int64_t i = begin; i < end; ++i) static_cast<uint8_t*>(result)[i] = static_cast<uint8_t>(to_e2m1_sat(x[i]));
      break;
    case Function::kFromE2m1:
      for (int64_t i = begin; i < end; ++i) y[i] = from_e2m1(x8[i] & 15u);
      break;
    case Function::kFsum16Bf16:
    case Function::kFsum16Fp16: {
      const uint16_t *a = static_cast<const uint16_t*>(inputs[1]), *b = static_cast<const uint16_t*>(inputs[2]);
      const Operand kind = function == Function::kFsum16Bf16 ? Operand::kBf16 : Operand::kFp16;
      for (int64_t i = begin; i < end; ++i) y[i] = canonical(fsum16(x[i], a + 16 * i, b + 16 * i, kind));
      break;
    }
    case Function::kCount:
      break;
  }
}

}  // namespace

Status numerics(Stream, Function function, int64_t n, const void* const* inputs, void* result) {
  parallel_for((n + kPart - 1) / kPart,
               [&](int64_t i) { part(function, i * kPart, std::min(n, (i + 1) * kPart), inputs, result); });
  return {};
}

}  // namespace muse
