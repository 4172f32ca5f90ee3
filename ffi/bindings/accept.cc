// The handler of acceptance, for both backends.
#include "ffi/draft/accept.h"

#include "ffi/bindings/reader.h"
#include "ffi/bindings/registry.h"

namespace muse::bindings {
namespace {

ffi::Error accept_impl(Stream stream, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t capacity,
                       ffi::Span<const int32_t> tap_layers) {
  return guarded("accept", [&]() -> ffi::Error {
    using ffi::DataType;
    Check check("accept");
    AcceptCall c{};
    Reader<ffi::RemainingArgs> in(args, &check);
    Reader<ffi::RemainingRets> out(rets, &check);
    const auto dims = in.peek(0), cache = in.peek(6);
    check.that(dims.size() == 2, "token needs 2 dimensions").that(cache.size() == 6, "k_full needs 6 dimensions");
    check.that(tap_layers.size() <= static_cast<size_t>(kMaxTapLayers),
               "a draft may see " + std::to_string(kMaxTapLayers) + " layers");
    if (!check.ok()) return check.error();
    const int64_t B = c.batch = dims[0], W = c.width = dims[1];
    c.capacity = capacity, c.ranks = cache[0], c.heads = cache[3];
    check.that(B > 0 && W > 0 && B * W <= kMaxTreeRows,
               "trees of " + std::to_string(B * W) + " nodes together, allowed: 1 to " + std::to_string(kMaxTreeRows));
    if (!check.ok()) return check.error();
    c.token = in.next<const int32_t>("token", DataType::S32, {B, W});
    c.parent = in.next<const int32_t>("parent", DataType::S32, {B, W});
    c.chosen = in.next<const int32_t>("chosen", DataType::S32, {B * W});
    c.nan = in.next<const bool>("nan", DataType::PRED, {B * W});
    c.lengths = in.next<const int32_t>("lengths", DataType::S32, {B});
    c.active = in.next<const bool>("active", DataType::PRED, {B});
    const char* names[kCaches] = {"k_full", "v_full", "k_ring", "v_ring"};
    for (int i = 0; i < kCaches; ++i) {
      const auto shape = in.peek(6 + i);
      check.that(shape.size() == 6 && shape[4] > 0, std::string(names[i]) + " needs 6 dimensions");
      if (!check.ok()) return check.error();
      c.layers[i] = shape[1], c.slots[i] = shape[4];
      in.next<const uint16_t>(names[i], DataType::BF16, {c.ranks, shape[1], B, c.heads, shape[4], kCacheRow});
      // The same memory as the operand: the call aliases them.
      c.cache[i] = out.next<uint16_t>(names[i], DataType::BF16, {c.ranks, shape[1], B, c.heads, shape[4], kCacheRow});
    }
    c.path = out.next<int32_t>("path", DataType::S32, {B, W});
    c.follows = out.next<int32_t>("follows", DataType::S32, {B, W});
    c.seen = out.next<int32_t>("seen", DataType::S32, {B, W});
    c.committed = out.next<int32_t>("committed", DataType::S32, {B});
    c.count = out.next<int32_t>("count", DataType::S32, {B});
    c.next = out.next<int32_t>("next", DataType::S32, {B});
    c.grown = out.next<int32_t>("grown", DataType::S32, {B});
    c.ended = out.next<bool>("ended", DataType::PRED, {B});
    c.taps = static_cast<int64_t>(tap_layers.size());
    if (c.taps > 0) {
      const auto shape = in.peek(10);
      check.that(shape.size() == 4 && shape[3] > 0 && shape[3] % 4 == 0,
                 "residuals need 4 dimensions, the last a multiple of 4");
      if (!check.ok()) return check.error();
      c.hidden = shape[3];
      c.residuals = in.next<const float>("residuals", DataType::F32, {shape[0], 2, B * W, c.hidden});
      c.features = out.next<uint16_t>("features", DataType::BF16, {B, W, c.taps, c.hidden});
      for (int64_t e = 0; e < c.taps; ++e) {
        c.tap[e] = tap_layers.begin()[e];
        check.that(c.tap[e] >= 0 && c.tap[e] < shape[0], "a draft sees layer " + std::to_string(c.tap[e]) +
                                                             ", allowed: 0 to " + std::to_string(shape[0] - 1));
      }
    }
    if (!check.ok()) return check.error();
    return to_error(accept(stream, c));
  });
}

XLA_FFI_DEFINE_HANDLER(kAccept, accept_impl,
                       ffi::Ffi::Bind()
                           .Ctx<StreamContext>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<int64_t>("capacity")
                           .Attr<ffi::Span<const int32_t>>("tap_layers"),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

HandlerList accept_handlers() { return {{"muse_accept_v1", kAccept}}; }

}  // namespace muse::bindings
