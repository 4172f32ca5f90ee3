#include "ffi/ops/gemm/gemm.h"

#include "ffi/bindings/handler.h"
#include "ffi/bindings/registry.h"

namespace muse::bindings {
namespace {

Nvfp4 nvfp4(const U8& codes, const E4m3& scales) { return {codes.typed_data(), scale_bits(scales)}; }

void check_codes(Check& check, const char* name, const U8& codes, const E4m3& scales, int64_t rows, int64_t inner) {
  check.shape(name, codes, {rows, inner / 2});
  check.e4m3((std::string(name) + " scales").c_str(), scales, {rows, inner / 16});
}

// The result says how many rows and columns and which type; K comes from x.
Check check_result(const char* op, const ffi::AnyBuffer& y, int64_t inner, GemmShape* shape) {
  Check check(op);
  check.rank("result", y, 2).multiple("K (the reduced dimension)", inner, 128);
  check.that(y.element_type() == ffi::BF16 || y.element_type() == ffi::F32, "result must be bfloat16 or float32");
  if (check.ok()) *shape = {y.dimensions()[0], y.dimensions()[1], inner, y.element_type() == ffi::BF16};
  return check;
}

ffi::Error gemm_impl(Stream stream, Bf16 x, Bf16 w, ffi::Result<ffi::AnyBuffer> y) {
  return guarded("gemm", [&] {
    Check check("gemm");
    if (!check.rank("x", x, 2).ok()) return check.error();
    GemmShape shape{};
    check = check_result("gemm", *y, x.dimensions()[1], &shape);
    check.shape("x", x, {shape.rows, shape.inner}).shape("w", w, {shape.columns, shape.inner});
    if (!check.ok()) return check.error();
    return to_error(gemm(stream, shape, bits(x), bits(w), y->untyped_data()));
  });
}

ffi::Error gemm_w4a16_impl(Stream stream, Bf16 x, U8 codes, E4m3 scales, Scalar weight_scale_2,
                           ffi::Result<ffi::AnyBuffer> y) {
  return guarded("gemm_w4a16", [&] {
    Check check("gemm_w4a16");
    if (!check.rank("x", x, 2).ok()) return check.error();
    GemmShape shape{};
    check = check_result("gemm_w4a16", *y, x.dimensions()[1], &shape);
    check.shape("x", x, {shape.rows, shape.inner});
    check_codes(check, "w", codes, scales, shape.columns, shape.inner);
    if (!check.ok()) return check.error();
    return to_error(
        gemm_w4a16(stream, shape, bits(x), nvfp4(codes, scales), weight_scale_2.typed_data(), y->untyped_data()));
  });
}

ffi::Error gemm_w4a4_impl(Stream stream, CallScratch scratch, U8 x_codes, E4m3 x_scales, U8 w_codes, E4m3 w_scales,
                          Scalar weight_scale_2, Scalar input_scale, ffi::Result<ffi::AnyBuffer> y) {
  return guarded("gemm_w4a4", [&] {
    Check check("gemm_w4a4");
    if (!check.rank("x codes", x_codes, 2).ok()) return check.error();
    GemmShape shape{};
    check = check_result("gemm_w4a4", *y, 2 * x_codes.dimensions()[1], &shape);
    check_codes(check, "x", x_codes, x_scales, shape.rows, shape.inner);
    check_codes(check, "w", w_codes, w_scales, shape.columns, shape.inner);
    if (!check.ok()) return check.error();
    return to_error(gemm_w4a4(stream, &scratch, shape, nvfp4(x_codes, x_scales), nvfp4(w_codes, w_scales),
                              weight_scale_2.typed_data(), input_scale.typed_data(), y->untyped_data()));
  });
}

XLA_FFI_DEFINE_HANDLER(kGemm, gemm_impl,
                       ffi::Ffi::Bind().Ctx<StreamContext>().Arg<Bf16>().Arg<Bf16>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(
    kGemmW4a16, gemm_w4a16_impl,
    ffi::Ffi::Bind().Ctx<StreamContext>().Arg<Bf16>().Arg<U8>().Arg<E4m3>().Arg<Scalar>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kGemmW4a4, gemm_w4a4_impl,
                       ffi::Ffi::Bind()
                           .Ctx<StreamContext>()
                           .Ctx<CallScratch>()
                           .Arg<U8>()
                           .Arg<E4m3>()
                           .Arg<U8>()
                           .Arg<E4m3>()
                           .Arg<Scalar>()
                           .Arg<Scalar>()
                           .Ret<ffi::AnyBuffer>());

}  // namespace

HandlerList gemm_handlers() {
  return {{"muse_gemm_v1", kGemm}, {"muse_gemm_w4a16_v1", kGemmW4a16}, {"muse_gemm_w4a4_v1", kGemmW4a4}};
}

}  // namespace muse::bindings
