// Handlers of the head, of log-probabilities, and of the contract's functions on raw arrays.
#include "ffi/ops/head/head.h"

#include "ffi/bindings/handler.h"
#include "ffi/bindings/registry.h"

namespace muse::bindings {
namespace {

ffi::Error head_impl(Stream stream, Bf16 h, Bf16 w, ffi::Result<F32> logits, float multiplier, float cap) {
  return guarded("head", [&] {
    Check check("head");
    check.rank("h", h, 2).rank("w", w, 2);
    if (!check.ok()) return check.error();
    const Head op{h.dimensions()[0], w.dimensions()[0], h.dimensions()[1], multiplier, cap};
    check.multiple("the hidden size", op.hidden, 128)
        .shape("w", w, {op.vocabulary, op.hidden})
        .shape("logits", *logits, {op.rows, op.vocabulary});
    if (!check.ok()) return check.error();
    return to_error(head(stream, op, bits(h), bits(w), logits->typed_data()));
  });
}

ffi::Error log_prob_impl(Stream stream, F32 logits, S32 token, ffi::Result<F32> result) {
  return guarded("log_prob", [&] {
    Check check("log_prob");
    if (!check.rank("logits", logits, 2).ok()) return check.error();
    const int64_t rows = logits.dimensions()[0], vocabulary = logits.dimensions()[1];
    check.multiple("the vocabulary", vocabulary, 8).shape("token", token, {rows}).shape("result", *result, {rows});
    if (!check.ok()) return check.error();
    return to_error(log_prob(stream, rows, vocabulary, logits.typed_data(), token.typed_data(), result->typed_data()));
  });
}

XLA_FFI_DEFINE_HANDLER(kHead, head_impl,
                       ffi::Ffi::Bind()
                           .Ctx<StreamContext>()
                           .Arg<Bf16>()
                           .Arg<Bf16>()
                           .Ret<F32>()
                           .Attr<float>("multiplier")
                           .Attr<float>("cap"));
XLA_FFI_DEFINE_HANDLER(kLogProb, log_prob_impl, ffi::Ffi::Bind().Ctx<StreamContext>().Arg<F32>().Arg<S32>().Ret<F32>());
}  // namespace

HandlerList head_handlers() { return {{"muse_head_v1", kHead}, {"muse_log_prob_v1", kLogProb}}; }

}  // namespace muse::bindings
