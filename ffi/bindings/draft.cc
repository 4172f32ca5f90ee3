// The draft's handler, for both backends: check operands, run or launch.
#include "ffi/draft/draft.h"

#include "ffi/bindings/reader.h"
#include "ffi/bindings/registry.h"
#include "ffi/draft/workspace.h"

namespace muse::bindings {
namespace {

bool read_plan(ffi::Span<const int64_t> dims, ffi::Span<const float> scalars, ffi::Span<const int64_t> windows,
               DraftPlan* p, Check* check) {
  check->that(dims.size() == kDraftDims, "attribute dims needs " + std::to_string(kDraftDims) + " numbers")
      .that(scalars.size() == 4, "attribute scalars needs 4")
      .that(windows.size() > 0 && windows.size() <= static_cast<size_t>(kMaxDraftLayers),
            "attribute windows needs a number per layer, at most " + std::to_string(kMaxDraftLayers));
  if (!check->ok()) return false;
  p->layers = static_cast<int64_t>(windows.size());
  read_dims(dims.begin(), p);
  const float* s = scalars.begin();
  p->eps = s[0], p->multiplier = s[1], p->cap = s[2], p->score_scale = s[3];
  for (int64_t l = 0; l < p->layers; ++l) p->window[l] = windows.begin()[l];
  return true;
}

// Operands: see `run` in muse_jax/speculative/dflash_call.py.
void read_operands(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets, Check* check, DraftCall* c) {
  using ffi::DataType;
  DraftPlan& p = c->plan;
  Reader<ffi::RemainingArgs> in(args, check);
  Reader<ffi::RemainingRets> out(rets, check);
  const auto dims_of = [&](size_t at, size_t axis) {
    const auto dims = in.peek(at);
    return axis < dims.size() ? dims[axis] : int64_t{0};
  };
  constexpr size_t kFirstRing = 9;
  p.batch = dims_of(0, 0), p.fed = dims_of(0, 1);
  for (int64_t l = 0; l < p.layers; ++l) p.slots[l] = dims_of(kFirstRing + 3 * l, 1);
  const std::string problem = check_draft_plan(p);
  check->that(problem.empty(), problem);
  if (!check->ok()) return;
  const int64_t B = p.batch, H = p.hidden, V = p.vocab, d = p.head_dim, Q = p.q_columns(), KV = p.kv_columns();
  const auto bf16 = [&](const char* name, std::initializer_list<int64_t> shape) {
    return in.next<const uint16_t>(name, DataType::BF16, shape);
  };
  const auto s32 = [&](const char* name) { return in.next<const int32_t>(name, DataType::S32, {B}); };
  c->features = bf16("features", {B, p.fed, p.taps, H});
  c->count = s32("count"), c->first = s32("first"), c->token = s32("token"), c->lengths = s32("lengths");
  c->frequencies = in.next<const float>("frequencies", DataType::F32, {d / 2});
  c->embedding = bf16("embedding", {V, H}), c->head = bf16("head", {V, H}), c->mask = bf16("mask_embedding", {H});
  if (p.width > 0) {
    c->tree_token = out.next<int32_t>("token", DataType::S32, {B, p.width});
    c->tree_parent = out.next<int32_t>("parent", DataType::S32, {B, p.width});
    c->tree_depth = out.next<int32_t>("depth", DataType::S32, {B, p.width});
    c->tree_ancestors = out.next<bool>("ancestors", DataType::PRED, {B, p.width, p.width});
  }
  for (int64_t l = 0; l < p.layers; ++l) {
    DraftLayer& layer = c->layer[l];
    const int64_t slots = p.slots[l];
    bf16("k", {B, slots, p.kv_heads, d}), bf16("v", {B, slots, p.kv_heads, d});
    in.next<const int32_t>("position", DataType::S32, {B, slots});
    // The same memory as the operands: the call aliases them.
    layer.ring_k = out.next<uint16_t>("k", DataType::BF16, {B, slots, p.kv_heads, d});
    layer.ring_v = out.next<uint16_t>("v", DataType::BF16, {B, slots, p.kv_heads, d});
    layer.ring_position = out.next<int32_t>("position", DataType::S32, {B, slots});
  }
  c->fc = bf16("fc", {H, p.taps * H}), c->hidden_norm = bf16("hidden_norm", {H});
  for (int64_t l = 0; l < p.layers; ++l) {
    DraftLayer& layer = c->layer[l];
    layer.input_norm = bf16("input_layernorm", {H}), layer.post_norm = bf16("post_attention_layernorm", {H});
    layer.q = bf16("q_proj", {Q, H}), layer.k = bf16("k_proj", {KV, H}), layer.v = bf16("v_proj", {KV, H});
    layer.o = bf16("o_proj", {H, Q}), layer.q_norm = bf16("q_norm", {d}), layer.k_norm = bf16("k_norm", {d});
    layer.gate = bf16("gate_proj", {p.inner, H}), layer.up = bf16("up_proj", {p.inner, H});
    layer.down = bf16("down_proj", {H, p.inner});
    for (DraftConvolution* conv : {&layer.attention, &layer.mlp}) {
      if (p.group == 0) continue;
      conv->base = bf16("base_kernel", {2, 2, H});
      conv->projection = bf16("kernel_projection", {p.conv_rows(), H});
    }
  }
  c->norm = bf16("norm", {H});
  if (p.is_v2()) {
    c->selector = bf16("hidden_projection", {p.rank, H});
    c->predecessor = bf16("predecessor_codebook", {V, p.rank});
    c->successor = bf16("successor_codebook", {V, p.rank});
  }
#if defined(MUSE_CUDA_MODULE)
  const int64_t bytes = draft_workspace(p).bytes;
  c->workspace = out.next<unsigned char>("workspace", DataType::U8, {bytes});
#endif
}

ffi::Error draft_impl(Stream stream, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Span<const int64_t> dims,
                      ffi::Span<const float> scalars, ffi::Span<const int64_t> windows) {
  return guarded("draft", [&]() -> ffi::Error {
    Check check("draft");
    DraftCall call{};
    if (!read_plan(dims, scalars, windows, &call.plan, &check)) return check.error();
    read_operands(args, rets, &check, &call);
    if (!check.ok()) return check.error();
    return to_error(draft(stream, call));
  });
}

// Graph capture is safe: memsets and one kernel on the given stream, and no memory but the operands' and results'.
XLA_FFI_DEFINE_HANDLER(kDraft, draft_impl,
                       ffi::Ffi::Bind()
                           .Ctx<StreamContext>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<ffi::Span<const int64_t>>("dims")
                           .Attr<ffi::Span<const float>>("scalars")
                           .Attr<ffi::Span<const int64_t>>("windows"),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

HandlerList draft_handlers() { return {{"muse_draft_v1", kDraft}}; }

}  // namespace muse::bindings
