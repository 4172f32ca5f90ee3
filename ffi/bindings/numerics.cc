#include "ffi/ops/numerics/numerics.h"

#include "ffi/bindings/handler.h"
#include "ffi/bindings/registry.h"

namespace muse::bindings {
namespace {

// What a function takes and gives: element types of inputs and result, and how many elements of each per result.
struct Signature {
  int inputs;
  ffi::DataType input[3];
  int64_t per_result[3];
  ffi::DataType result;
};

Signature signature(Function function) {
  switch (function) {
    case Function::kFma:
      return {3, {ffi::F32, ffi::F32, ffi::F32}, {1, 1, 1}, ffi::F32};
    case Function::kToBf16:
      return {1, {ffi::F32}, {1}, ffi::U16};
    case Function::kFromBf16:
    case Function::kFromFp16:
      return {1, {ffi::U16}, {1}, ffi::F32};
    case Function::kToE4m3:
    case Function::kToE2m1:
      return {1, {ffi::F32}, {1}, ffi::U8};
    case Function::kFromE4m3:
    case Function::kFromE2m1:
      return {1, {ffi::U8}, {1}, ffi::F32};
    case Function::kFsum16Bf16:
    case Function::kFsum16Fp16:
      return {3, {ffi::F32, ffi::U16, ffi::U16}, {1, 16, 16}, ffi::F32};
    default:
      return {1, {ffi::F32}, {1}, ffi::F32};
  }
}

ffi::Error numerics_impl(Stream stream, ffi::RemainingArgs inputs, ffi::Result<ffi::AnyBuffer> y, int64_t function) {
  return guarded("numerics", [&] {
    Check check("numerics");
    check.that(function >= 0 && function < static_cast<int64_t>(Function::kCount),
               "function is " + std::to_string(function) + ", which names none of the contract's functions");
    if (!check.ok()) return check.error();
    const Signature expected = signature(static_cast<Function>(function));
    check.that(inputs.size() == static_cast<size_t>(expected.inputs),
               "expected " + std::to_string(expected.inputs) + " operands, got " + std::to_string(inputs.size()));
    if (!check.ok()) return check.error();
    const int64_t n = static_cast<int64_t>(y->element_count());
    const void* data[3] = {};
    for (int i = 0; i < expected.inputs; ++i) {
      const auto buffer = inputs.get<ffi::AnyBuffer>(i);
      if (!buffer) return invalid("numerics: operand " + std::to_string(i) + " is not an array");
      check.that(buffer->element_type() == expected.input[i], "operand " + std::to_string(i) + " has the wrong type")
          .that(static_cast<int64_t>(buffer->element_count()) == n * expected.per_result[i],
                "operand " + std::to_string(i) + " has the wrong size");
      data[i] = buffer->untyped_data();
    }
    check.that(y->element_type() == expected.result, "the result has the wrong type");
    if (!check.ok()) return check.error();
    return to_error(numerics(stream, static_cast<Function>(function), n, data, y->untyped_data()));
  });
}

XLA_FFI_DEFINE_HANDLER(
    kNumerics, numerics_impl,
    ffi::Ffi::Bind().Ctx<StreamContext>().RemainingArgs().Ret<ffi::AnyBuffer>().Attr<int64_t>("function"));

}  // namespace

HandlerList numerics_handlers() { return {{"muse_numerics_v1", kNumerics}}; }

}  // namespace muse::bindings
