// Handlers of the element-wise and row-wise ops: norms, RoPE, residual gate.
#include "ffi/ops/norm/norm.h"

#include "ffi/bindings/handler.h"
#include "ffi/bindings/registry.h"
#include "ffi/ops/residual/residual.h"
#include "ffi/ops/rope/rope.h"

namespace muse::bindings {
namespace {

ffi::Error rms_norm_impl(Stream stream, ffi::AnyBuffer x, Bf16 gain, ffi::Result<Bf16> y, float eps, int64_t kind,
                         bool round_input, bool centred) {
  return guarded("rms_norm", [&] {
    Check check("rms_norm");
    if (!check.rank("x", x, 2).ok()) return check.error();
    const int64_t rows = x.dimensions()[0], columns = x.dimensions()[1];
    const bool fp32 = x.element_type() == ffi::F32, weightless = gain.element_count() == 0;
    check.that(fp32 || x.element_type() == ffi::BF16, "x must be bfloat16 or float32")
        .multiple("the row length", columns, 128)
        .that(kind == 0 || kind == 1, "kind must be 0 (gained or plain) or 1 (scale first)")
        .that(kind == 0 || !(fp32 || weightless), "the scale-first norm takes a bfloat16 x and a gain")
        .shape("y", *y, {rows, columns});
    if (!weightless) check.shape("gain", gain, {columns});
    if (!check.ok()) return check.error();
    const RmsNorm op{rows, columns, eps, fp32, kind == 1, round_input, centred};
    return to_error(rms_norm(stream, op, x.untyped_data(), weightless ? nullptr : bits(gain), bits(y)));
  });
}

// Checks x [T, N, 64] and its table; a call without rotation may bring any table.
Check check_heads(const char* name, const char* operand, const Bf16& x, const F32& table, float eps, bool rotate,
                  NormRope* op) {
  Check check(name);
  check.shape(operand, x, {-1, -1, 64});
  if (!check.ok()) return check;
  *op = {x.dimensions()[0], x.dimensions()[1], eps, rotate};
  if (rotate) check.shape("table", table, {op->rows, 64});
  return check;
}

ffi::Error q_norm_rope_impl(Stream stream, Bf16 x, F32 table, ffi::Result<Bf16> y, float eps, bool rotate) {
  return guarded("q_norm_rope", [&] {
    NormRope op{};
    Check check = check_heads("q_norm_rope", "x", x, table, eps, rotate, &op);
    check.shape("y", *y, {op.rows, op.heads, 64});
    if (!check.ok()) return check.error();
    return to_error(q_norm_rope(stream, op, bits(x), table.typed_data(), bits(y)));
  });
}

ffi::Error kv_norm_rope_impl(Stream stream, Bf16 k, Bf16 v, F32 table, ffi::Result<Bf16> k_cached,
                             ffi::Result<Bf16> v_cached, float eps, bool rotate) {
  return guarded("kv_norm_rope", [&] {
    NormRope op{};
    Check check = check_heads("kv_norm_rope", "k", k, table, eps, rotate, &op);
    check.shape("v", v, {op.rows, op.heads, 64})
        .shape("cached k", *k_cached, {op.rows, op.heads, 64})
        .shape("cached v", *v_cached, {op.rows, op.heads, 64});
    if (!check.ok()) return check.error();
    return to_error(kv_norm_rope(stream, op, bits(k), bits(v), table.typed_data(), bits(k_cached), bits(v_cached)));
  });
}

ffi::Error gate_coefficients_impl(Stream stream, Bf16 gate, ffi::Result<F32> alpha, ffi::Result<F32> beta,
                                  float temperature) {
  return guarded("gate_coefficients", [&] {
    Check check("gate_coefficients");
    if (!check.rank("gate", gate, 1).ok()) return check.error();
    const int64_t columns = gate.dimensions()[0];
    check.shape("alpha", *alpha, {columns}).shape("beta", *beta, {columns});
    if (!check.ok()) return check.error();
    return to_error(
        gate_coefficients(stream, columns, temperature, bits(gate), alpha->typed_data(), beta->typed_data()));
  });
}

ffi::Error residual_impl(Stream stream, F32 s, Bf16 n, F32 alpha, F32 beta, ffi::Result<F32> out) {
  return guarded("residual", [&] {
    Check check("residual");
    if (!check.rank("s", s, 2).ok()) return check.error();
    const int64_t rows = s.dimensions()[0], columns = s.dimensions()[1];
    check.shape("n", n, {rows, columns})
        .shape("alpha", alpha, {columns})
        .shape("beta", beta, {columns})
        .shape("result", *out, {rows, columns});
    if (!check.ok()) return check.error();
    return to_error(residual(stream, rows, columns, s.typed_data(), bits(n), alpha.typed_data(), beta.typed_data(),
                             out->typed_data()));
  });
}

XLA_FFI_DEFINE_HANDLER(kRmsNorm, rms_norm_impl,
                       ffi::Ffi::Bind()
                           .Ctx<StreamContext>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<Bf16>()
                           .Ret<Bf16>()
                           .Attr<float>("eps")
                           .Attr<int64_t>("kind")
                           .Attr<bool>("round_input")
                           .Attr<bool>("centred"));
XLA_FFI_DEFINE_HANDLER(
    kQNormRope, q_norm_rope_impl,
    ffi::Ffi::Bind().Ctx<StreamContext>().Arg<Bf16>().Arg<F32>().Ret<Bf16>().Attr<float>("eps").Attr<bool>("rotate"));
XLA_FFI_DEFINE_HANDLER(kKvNormRope, kv_norm_rope_impl,
                       ffi::Ffi::Bind()
                           .Ctx<StreamContext>()
                           .Arg<Bf16>()
                           .Arg<Bf16>()
                           .Arg<F32>()
                           .Ret<Bf16>()
                           .Ret<Bf16>()
                           .Attr<float>("eps")
                           .Attr<bool>("rotate"));
XLA_FFI_DEFINE_HANDLER(
    kGateCoefficients, gate_coefficients_impl,
    ffi::Ffi::Bind().Ctx<StreamContext>().Arg<Bf16>().Ret<F32>().Ret<F32>().Attr<float>("temperature"));
XLA_FFI_DEFINE_HANDLER(kResidual, residual_impl,
                       ffi::Ffi::Bind().Ctx<StreamContext>().Arg<F32>().Arg<Bf16>().Arg<F32>().Arg<F32>().Ret<F32>());

}  // namespace

HandlerList norm_handlers() {
  return {{"muse_rms_norm_v1", kRmsNorm},
          {"muse_q_norm_rope_v1", kQNormRope},
          {"muse_kv_norm_rope_v1", kKvNormRope},
          {"muse_gate_coefficients_v1", kGateCoefficients},
          {"muse_residual_v1", kResidual}};
}

}  // namespace muse::bindings
