#include "ffi/ops/attention/attention.h"

#include "ffi/bindings/handler.h"
#include "ffi/bindings/registry.h"

namespace muse::bindings {
namespace {

ffi::Error attention_impl(Stream stream, Bf16 q, Bf16 k, Bf16 v, S32 position, ffi::Result<Bf16> a, float scale,
                          int64_t window) {
  return guarded("attention", [&] {
    Check check("attention");
    check.shape("q", q, {-1, -1, -1, 64}).shape("k", k, {-1, -1, -1, 64});
    if (!check.ok()) return check.error();
    const auto rows = q.dimensions(), keys = k.dimensions();
    const Attention op{rows[0], rows[1], keys[1], rows[2], keys[2], scale, window};
    check.shape("k", k, {op.batch, -1, -1, 64})
        .shape("v", v, {op.batch, op.keys, op.kv_heads, 64})
        .shape("position", position, {op.rows})
        .shape("a", *a, {op.batch, op.rows, op.heads, 64})
        .that(op.kv_heads > 0 && op.heads % op.kv_heads == 0,
              "q has " + std::to_string(op.heads) + " heads, expected a multiple of k's " + std::to_string(op.kv_heads))
        .that(window >= 0, "window is " + std::to_string(window) + ", expected 0 (full) or a positive length");
    if (!check.ok()) return check.error();
    return to_error(attention(stream, op, bits(q), bits(k), bits(v), position.typed_data(), bits(a)));
  });
}

ffi::Error attention_gate_impl(Stream stream, Bf16 a, Bf16 u, ffi::Result<Bf16> o, float eps) {
  return guarded("attention_gate", [&] {
    Check check("attention_gate");
    check.shape("a", a, {-1, -1, 64});
    if (!check.ok()) return check.error();
    const int64_t rows = a.dimensions()[0], heads = a.dimensions()[1];
    check.shape("u", u, {rows, heads * 64}).shape("o", *o, {rows, heads * 64});
    if (!check.ok()) return check.error();
    return to_error(attention_gate(stream, rows, heads, eps, bits(a), bits(u), bits(o)));
  });
}

XLA_FFI_DEFINE_HANDLER(kAttention, attention_impl,
                       ffi::Ffi::Bind()
                           .Ctx<StreamContext>()
                           .Arg<Bf16>()
                           .Arg<Bf16>()
                           .Arg<Bf16>()
                           .Arg<S32>()
                           .Ret<Bf16>()
                           .Attr<float>("scale")
                           .Attr<int64_t>("window"));
XLA_FFI_DEFINE_HANDLER(kAttentionGate, attention_gate_impl,
                       ffi::Ffi::Bind().Ctx<StreamContext>().Arg<Bf16>().Arg<Bf16>().Ret<Bf16>().Attr<float>("eps"));

}  // namespace

HandlerList attention_handlers() {
  return {{"muse_attention_v1", kAttention}, {"muse_attention_gate_v1", kAttentionGate}};
}

}  // namespace muse::bindings
