// Handlers of the MoE ops: router, quantisers, experts, combination.
#include "ffi/ops/experts/experts.h"

#include "ffi/bindings/handler.h"
#include "ffi/bindings/registry.h"
#include "ffi/ops/combine/combine.h"
#include "ffi/ops/quantize/quantize.h"
#include "ffi/ops/router/router.h"

namespace muse::bindings {
namespace {

using ScalarS32 = ffi::BufferR0<ffi::S32>;

uint8_t* result_bits(ffi::Result<ffi::AnyBuffer>& buffer) { return static_cast<uint8_t*>(buffer->untyped_data()); }

ffi::Error router_impl(Stream stream, Bf16 h, F32 w, F32 bias, ffi::Result<S32> experts, ffi::Result<F32> weights,
                       ffi::Result<F32> logits, float multiplier, float scaling) {
  return guarded("router", [&] {
    Check check("router");
    check.rank("h", h, 2).rank("w", w, 2).rank("experts", *experts, 2);
    if (!check.ok()) return check.error();
    const Router op{h.dimensions()[0],        h.dimensions()[1], w.dimensions()[0],
                    experts->dimensions()[1], multiplier,        scaling};
    check.multiple("the hidden size", op.hidden, 128)
        .shape("w", w, {op.experts, op.hidden})
        .shape("bias", bias, {op.experts})
        .shape("experts", *experts, {op.rows, op.slots})
        .shape("weights", *weights, {op.rows, op.slots})
        .shape("logits", *logits, {op.rows, op.experts})
        .that(op.slots >= 1 && op.slots <= op.experts && op.slots <= kRouterMaxSlots,
              std::to_string(op.slots) + " experts per token, expected 1 to " +
                  std::to_string(op.experts < kRouterMaxSlots ? op.experts : kRouterMaxSlots));
    if (!check.ok()) return check.error();
    return to_error(router(stream, op, bits(h), w.typed_data(), bias.typed_data(), experts->typed_data(),
                           weights->typed_data(), logits->typed_data()));
  });
}

ffi::Error quantize_impl(Stream stream, Bf16 x, Scalar input_scale, ffi::Result<U8> codes,
                         ffi::Result<ffi::AnyBuffer> scales) {
  return guarded("quantize", [&] {
    Check check("quantize");
    if (!check.rank("x", x, 2).ok()) return check.error();
    const int64_t rows = x.dimensions()[0], inner = x.dimensions()[1];
    check.multiple("the row length", inner, 16)
        .shape("codes", *codes, {rows, inner / 2})
        .e4m3("scales", *scales, {rows, inner / 16});
    if (!check.ok()) return check.error();
    return to_error(
        quantize(stream, rows, inner, bits(x), input_scale.typed_data(), codes->typed_data(), result_bits(scales)));
  });
}

ffi::Error quantize_weight_impl(Stream stream, Bf16 w, ffi::Result<U8> codes, ffi::Result<ffi::AnyBuffer> scales,
                                ffi::Result<F32> weight_scale_2) {
  return guarded("quantize_weight", [&] {
    Check check("quantize_weight");
    if (!check.rank("w", w, 3).ok()) return check.error();
    const int64_t tensors = w.dimensions()[0], rows = w.dimensions()[1], inner = w.dimensions()[2];
    check.multiple("the row length", inner, 16)
        .shape("codes", *codes, {tensors, rows, inner / 2})
        .e4m3("scales", *scales, {tensors, rows, inner / 16})
        .shape("weight_scale_2", *weight_scale_2, {tensors});
    if (!check.ok()) return check.error();
    return to_error(quantize_weight(stream, tensors, rows, inner, bits(w), codes->typed_data(), result_bits(scales),
                                    weight_scale_2->typed_data()));
  });
}

// Sizes of an expert call from x, experts and the number of local experts; w13's rows give the intermediate size.
template <typename W13>
Check check_experts(const char* name, const Bf16& x, const S32& experts, const W13& w13, const Bf16& f, ExpertFfn* op) {
  Check check(name);
  check.rank("x", x, 2).rank("experts", experts, 2).rank("w13", w13, 3);
  if (!check.ok()) return check;
  *op = {x.dimensions()[0], experts.dimensions()[1], x.dimensions()[1], w13.dimensions()[1] / 2, w13.dimensions()[0]};
  check.multiple("the MoE hidden size", op->model, 128)
      .multiple("the MoE intermediate size", op->intermediate, 128)
      .that(w13.dimensions()[1] % 2 == 0, "w13 has an odd number of rows, expected gate rows and as many up rows")
      .shape("experts", experts, {op->tokens, op->slots})
      .shape("f", f, {op->tokens, op->slots, op->model});
  return check;
}

ffi::Error expert_ffn_impl(Stream stream, CallScratch scratch, Bf16 x, S32 experts, ScalarS32 first, Bf16 w13, Bf16 w2,
                           ffi::Result<Bf16> f) {
  return guarded("expert_ffn", [&] {
    ExpertFfn op{};
    Check check = check_experts("expert_ffn", x, experts, w13, *f, &op);
    check.shape("w13", w13, {op.local, 2 * op.intermediate, op.model})
        .shape("w2", w2, {op.local, op.model, op.intermediate});
    if (!check.ok()) return check.error();
    return to_error(expert_ffn(stream, &scratch, op, bits(x), experts.typed_data(), first.typed_data(), bits(w13),
                               bits(w2), bits(f)));
  });
}

ffi::Error expert_ffn_nvfp4_impl(Stream stream, CallScratch scratch, Bf16 x, S32 experts, ScalarS32 first, U8 w13,
                                 E4m3 w13_scales, F32 w13_scale_2, U8 w2, E4m3 w2_scales, F32 w2_scale_2,
                                 F32 input_scales, ffi::Result<Bf16> f, bool quantize_activations) {
  return guarded("expert_ffn_nvfp4", [&] {
    ExpertFfn op{};
    Check check = check_experts("expert_ffn_nvfp4", x, experts, w13, *f, &op);
    check.shape("w13 codes", w13, {op.local, 2 * op.intermediate, op.model / 2})
        .e4m3("w13 scales", w13_scales, {op.local, 2 * op.intermediate, op.model / 16})
        .shape("w13 scale_2", w13_scale_2, {op.local, 2})
        .shape("w2 codes", w2, {op.local, op.model, op.intermediate / 2})
        .e4m3("w2 scales", w2_scales, {op.local, op.model, op.intermediate / 16})
        .shape("w2 scale_2", w2_scale_2, {op.local})
        .shape("input_scales", input_scales, {2});
    if (!check.ok()) return check.error();
    const Nvfp4Experts weights{{w13.typed_data(), scale_bits(w13_scales)},
                               {w2.typed_data(), scale_bits(w2_scales)},
                               w13_scale_2.typed_data(),
                               w2_scale_2.typed_data(),
                               input_scales.typed_data(),
                               quantize_activations};
    return to_error(
        expert_ffn_nvfp4(stream, &scratch, op, bits(x), experts.typed_data(), first.typed_data(), weights, bits(f)));
  });
}

ffi::Error combine_impl(Stream stream, Bf16 f, F32 weights, S32 experts, Bf16 gain, ffi::Result<Bf16> x, float eps) {
  return guarded("combine", [&] {
    Check check("combine");
    if (!check.rank("f", f, 3).ok()) return check.error();
    const Combine op{f.dimensions()[0], f.dimensions()[1], f.dimensions()[2], eps};
    check.multiple("the MoE hidden size", op.columns, 128)
        .that(op.slots <= kRouterMaxSlots,
              std::to_string(op.slots) + " experts per token, expected at most " + std::to_string(kRouterMaxSlots))
        .shape("weights", weights, {op.rows, op.slots})
        .shape("experts", experts, {op.rows, op.slots})
        .shape("gain", gain, {op.columns})
        .shape("x", *x, {op.rows, op.columns});
    if (!check.ok()) return check.error();
    return to_error(combine(stream, op, bits(f), weights.typed_data(), experts.typed_data(), bits(gain), bits(x)));
  });
}

XLA_FFI_DEFINE_HANDLER(kRouter, router_impl,
                       ffi::Ffi::Bind()
                           .Ctx<StreamContext>()
                           .Arg<Bf16>()
                           .Arg<F32>()
                           .Arg<F32>()
                           .Ret<S32>()
                           .Ret<F32>()
                           .Ret<F32>()
                           .Attr<float>("multiplier")
                           .Attr<float>("scaling"));
XLA_FFI_DEFINE_HANDLER(kQuantize, quantize_impl,
                       ffi::Ffi::Bind().Ctx<StreamContext>().Arg<Bf16>().Arg<Scalar>().Ret<U8>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kQuantizeWeight, quantize_weight_impl,
                       ffi::Ffi::Bind().Ctx<StreamContext>().Arg<Bf16>().Ret<U8>().Ret<ffi::AnyBuffer>().Ret<F32>());
XLA_FFI_DEFINE_HANDLER(kExpertFfn, expert_ffn_impl,
                       ffi::Ffi::Bind()
                           .Ctx<StreamContext>()
                           .Ctx<CallScratch>()
                           .Arg<Bf16>()
                           .Arg<S32>()
                           .Arg<ScalarS32>()
                           .Arg<Bf16>()
                           .Arg<Bf16>()
                           .Ret<Bf16>());
XLA_FFI_DEFINE_HANDLER(kExpertFfnNvfp4, expert_ffn_nvfp4_impl,
                       ffi::Ffi::Bind()
                           .Ctx<StreamContext>()
                           .Ctx<CallScratch>()
                           .Arg<Bf16>()
                           .Arg<S32>()
                           .Arg<ScalarS32>()
                           .Arg<U8>()
                           .Arg<E4m3>()
                           .Arg<F32>()
                           .Arg<U8>()
                           .Arg<E4m3>()
                           .Arg<F32>()
                           .Arg<F32>()
                           .Ret<Bf16>()
                           .Attr<bool>("quantize_activations"));
XLA_FFI_DEFINE_HANDLER(
    kCombine, combine_impl,
    ffi::Ffi::Bind().Ctx<StreamContext>().Arg<Bf16>().Arg<F32>().Arg<S32>().Arg<Bf16>().Ret<Bf16>().Attr<float>("eps"));

}  // namespace

HandlerList expert_handlers() {
  return {{"muse_router_v1", kRouter},
          {"muse_quantize_v1", kQuantize},
          {"muse_quantize_weight_v1", kQuantizeWeight},
          {"muse_expert_ffn_v1", kExpertFfn},
          {"muse_expert_ffn_nvfp4_v1", kExpertFfnNvfp4},
          {"muse_combine_v1", kCombine}};
}

}  // namespace muse::bindings
