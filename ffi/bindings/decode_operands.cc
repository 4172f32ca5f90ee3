#include "ffi/bindings/decode_operands.h"

#include "ffi/bindings/reader.h"

namespace muse::bindings {
namespace {

// Bits of the attribute layer_kinds.
constexpr int32_t kFull = 1, kRope = 2, kNvfp4 = 4;

// The order of these two attributes is the contract with muse_jax/decode/step.py.
bool read_plan(ffi::Span<const int64_t> dims, ffi::Span<const float> scalars, ffi::Span<const int32_t> kinds,
               Check* check, LayersOperands* out) {
  Plan* p = &out->call.plan;
  check->that(dims.size() == 13, "attribute dims needs 13 numbers")
      .that(scalars.size() == 6, "attribute scalars needs 6");
  if (!check->ok()) return false;
  const int64_t* d = dims.begin();
  p->layers = d[0], p->hidden = d[1], p->q_heads = d[2], p->kv_heads = d[3], p->moe_hidden = d[4], p->moe_inner = d[5];
  p->experts = d[6], p->top_k = d[7], p->vocab = d[8], p->window = d[9], p->layer_begin = d[10], p->layer_end = d[11];
  p->quantize_activations = d[12] != 0;
  const float* s = scalars.begin();
  p->eps = s[0], p->post_eps = s[1], p->score_scale = s[2], p->router_multiplier = s[3], p->routed_scaling = s[4];
  out->head.multiplier = s[3], out->head.cap = s[5];
  check->that(static_cast<int64_t>(kinds.size()) == p->layers && p->layers <= kMaxLayers,
              "attribute layer_kinds needs one number per layer, at most " + std::to_string(kMaxLayers));
  if (!check->ok()) return false;
  int16_t cache[2] = {}, experts[2] = {};
  for (int64_t l = 0; l < p->layers; ++l) {
    LayerKind& kind = p->kind[l];
    kind.full = kinds.begin()[l] & kFull, kind.rope = kinds.begin()[l] & kRope, kind.nvfp4 = kinds.begin()[l] & kNvfp4;
    kind.cache = cache[kind.full]++;
    kind.experts = experts[kind.nvfp4]++;
  }
  return true;
}

int64_t count(const Plan& p, bool LayerKind::* field, bool value) {
  int64_t n = 0;
  for (int64_t l = 0; l < p.layers; ++l) n += p.kind[l].*field == value;
  return n;
}

// Operands in the order of docs/architecture.md; see OPERANDS in muse_jax/decode/step.py.
bool read_operands(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets, bool taps, bool head, Check* check,
                   LayersOperands* member) {
  Plan& p = member->call.plan;
  Reader<ffi::RemainingArgs> in(args, check);
  const auto dims_of = [&](size_t at, size_t axis) {
    const auto dims = in.peek(at);
    return axis < dims.size() ? dims[axis] : int64_t{0};
  };
  const int64_t R = dims_of(0, 0);
  p.rows = dims_of(1, 0), p.sequences = dims_of(5, 0), p.capacity = dims_of(7, 0), p.ring = dims_of(11, 4);
  check->that(R > 0 && kRanks % R == 0, "ranks has " + std::to_string(R) + " entries, allowed: 1, 2, 4 or 8");
  const std::string problem = check_plan(p);
  check->that(problem.empty(), problem);
  if (!check->ok()) return false;

  const int64_t L = p.layers, H = p.hidden, M = p.moe_hidden, I = p.moe_inner, E = p.experts, T = p.rows,
                B = p.sequences;
  const int64_t full = count(p, &LayerKind::full, true), quantized = count(p, &LayerKind::nvfp4, true),
                plain = L - quantized;
  const auto at_least_one = [](int64_t n) { return n > 0 ? n : int64_t{1}; };  // an empty kind keeps one unused layer
  using ffi::DataType;
  SharedPointers& s = member->call.shared;
  const int32_t* ranks = in.next<const int32_t>("ranks", DataType::S32, {R, 2});
  s.token = in.next<const int32_t>("token", DataType::S32, {T});
  s.sequence = in.next<const int32_t>("sequence", DataType::S32, {T});
  s.position = in.next<const int32_t>("position", DataType::S32, {T});
  s.ancestors = in.next<const bool>("ancestors", DataType::PRED, {T, T});
  s.lengths = in.next<const int32_t>("lengths", DataType::S32, {B});
  s.stream = in.next<const float>("stream", DataType::F32, {T, H});
  s.rope = in.next<const float>("rope", DataType::F32, {p.capacity, kHeadDim});
  const int32_t* epoch = in.next<const int32_t>("epoch", DataType::S32, {2});
  const int64_t full_shape[] = {at_least_one(full), p.capacity}, ring_shape[] = {at_least_one(L - full), p.ring};
  const uint16_t* caches[4];
  const char* cache_names[4] = {"k_full", "v_full", "k_ring", "v_ring"};
  for (int c = 0; c < 4; ++c) {
    const int64_t* shape = c < 2 ? full_shape : ring_shape;
    caches[c] =
        in.next<const uint16_t>(cache_names[c], DataType::BF16, {R, shape[0], B, p.kv_rank(), shape[1], kHeadDim});
  }
  const auto* embed = in.next<const uint16_t>("embed", DataType::BF16, {R, p.vocab_rank(), H});
  s.hidden_gains = in.next<const uint16_t>("hidden_gains", DataType::BF16, {L, 3, H});
  s.moe_gains = in.next<const uint16_t>("moe_gains", DataType::BF16, {L, 2, M});
  s.gates = in.next<const float>("gates", DataType::F32, {L, 4, H});
  const auto* qkvu = in.next<const uint16_t>("qkvu", DataType::BF16, {R, L, p.qkvu_rows() / 16, H / 16, kTile});
  const auto* o = in.next<const uint16_t>("o", DataType::BF16, {R, L, H / 16, p.q_columns() / 16, kTile});
  const auto* router = in.next<const float>("router", DataType::F32, {R, L, p.experts_rank(), H});
  s.router_bias = in.next<const float>("router_bias", DataType::F32, {L, E});
  const auto* pre = in.next<const uint16_t>("pre_expert", DataType::BF16, {R, L, p.moe_columns() / 16, H / 16, kTile});
  const auto* post =
      in.next<const uint16_t>("post_expert", DataType::BF16, {R, L, H / 16, p.moe_columns() / 16, kTile});
  const int64_t w13_groups = 2 * p.inner_columns() / 16, w2_groups = p.moe_columns() / 16, lb = at_least_one(plain),
                lq = at_least_one(quantized);
  const auto* w13_bf16 = in.next<const uint16_t>("w13_bf16", DataType::BF16, {R, lb, E, w13_groups, M / 16, kTile});
  const auto* w2_bf16 = in.next<const uint16_t>("w2_bf16", DataType::BF16, {R, lb, E, w2_groups, I / 16, kTile});
  const auto* w13_fp4 =
      in.next<const uint8_t>("w13_fp4", DataType::U8, {R, lq, E, w13_groups, kSegments, Plan::panels(M), kPanelBytes});
  const auto* w2_fp4 =
      in.next<const uint8_t>("w2_fp4", DataType::U8, {R, lq, E, w2_groups, kSegments, Plan::panels(I), kPanelBytes});
  s.scale_2 = in.next<const float>("scale_2", DataType::F32, {L, E, 3});
  s.input_scales = in.next<const float>("input_scales", DataType::F32, {L, 2});
  if (head) {
    member->head.gain = in.next<const uint16_t>("gain", DataType::BF16, {H});
    member->head.lm_head = in.next<const uint16_t>("lm_head", DataType::BF16, {R, p.head_groups(), H / 16, kTile});
    member->head.lm_head_elements = p.head_groups() * H * 16;
  }

  Reader<ffi::RemainingRets> out(rets, check);
  const int64_t run = p.layer_end - p.layer_begin, K = p.top_k;
  StepResults results{};
  results.stream = out.next<float>("stream result", DataType::F32, {T, H});
  member->epoch = out.next<int32_t>("epoch result", DataType::S32, {2});
  uint16_t* updated[4];
  for (int c = 0; c < 4; ++c) updated[c] = out.next<uint16_t>(cache_names[c], DataType::BF16, {-1, -1, -1, -1, -1, -1});
  if (taps) {
    results.tap_residuals = out.next<float>("residual taps", DataType::F32, {run, 2, T, H});
    results.tap_experts = out.next<int32_t>("expert taps", DataType::S32, {run, T, K});
    results.tap_weights = out.next<float>("router weight taps", DataType::F32, {run, T, K});
  }
  if (head) {
    member->head.logits = out.next<float>("logits", DataType::F32, {R, T, p.vocab_rank()});
    member->head.token = out.next<int32_t>("token result", DataType::S32, {T});
    member->head.nan = out.next<bool>("nan", DataType::PRED, {T});
  }
  if (!check->ok()) return false;
  check->that(member->epoch == epoch, "epoch must be aliased to its result");
  for (int c = 0; c < 4; ++c)
    check->that(updated[c] == caches[c], std::string(cache_names[c]) + " must be aliased to its result");
  if (!check->ok()) return false;
  member->call.results.push_back(results);
  member->ranks = ranks;
  member->count = R;

  for (int64_t i = 0; i < R; ++i) {
    RankPointers& r = member->local[i];
    const auto share = [i](auto* base, int64_t per_rank) { return base + i * per_rank; };
    const int64_t w13_tiles = E * w13_groups * (M / 16), w2_tiles = E * w2_groups * (I / 16);
    r.embed = share(embed, p.vocab_rank() * H);
    r.qkvu = share(qkvu, p.qkvu(L));
    r.o = share(o, p.o(L));
    r.router = share(router, p.router(L));
    r.pre_expert = share(pre, p.pre_expert(L));
    r.post_expert = share(post, p.post_expert(L));
    r.w13_bf16 = share(w13_bf16, lb * w13_tiles * kTile);
    r.w2_bf16 = share(w2_bf16, lb * w2_tiles * kTile);
    r.w13_fp4 = share(w13_fp4, lq * E * w13_groups * Plan::fp4_group(M));
    r.w2_fp4 = share(w2_fp4, lq * E * w2_groups * Plan::fp4_group(I));
    const int64_t per_layer = B * p.kv_rank() * kHeadDim;
    r.k_full = share(updated[0], full_shape[0] * per_layer * p.capacity);
    r.v_full = share(updated[1], full_shape[0] * per_layer * p.capacity);
    r.k_ring = share(updated[2], ring_shape[0] * per_layer * p.ring);
    r.v_ring = share(updated[3], ring_shape[0] * per_layer * p.ring);
  }
  return true;
}

}  // namespace

bool read_layers(ffi::Span<const int64_t> dims, ffi::Span<const float> scalars, ffi::Span<const int32_t> layer_kinds,
                 const ffi::RemainingArgs& args, const ffi::RemainingRets& rets, bool taps, bool head, Check* check,
                 LayersOperands* out) {
  return read_plan(dims, scalars, layer_kinds, check, out) && read_operands(args, rets, taps, head, check, out);
}

bool read_head(const S32& ranks, const F32& stream, const Bf16& gain, const Bf16& lm_head, const S32& sequence,
               const S32& epoch, const F32& logits, const S32& token, const ffi::Buffer<ffi::PRED>& nan, int64_t vocab,
               Check* check, HeadShape* out) {
  check->rank("ranks", ranks, 2).rank("stream", stream, 2).multiple("vocab_size", vocab, kRanks);
  if (!check->ok()) return false;
  const int64_t R = ranks.dimensions()[0], T = stream.dimensions()[0], H = stream.dimensions()[1];
  const int64_t columns = vocab / kRanks, groups = (columns + 15) / 16;
  check->multiple("hidden_size", H, 128)
      .that(R > 0 && kRanks % R == 0, "ranks has " + std::to_string(R) + " entries, allowed: 1, 2, 4 or 8")
      .that(T >= 1 && T <= kMaxRows, "stream has " + std::to_string(T) + " rows, allowed: 1 to 64")
      .shape("ranks", ranks, {R, 2})
      .shape("gain", gain, {H})
      .shape("lm_head", lm_head, {R, groups, H / 16, kTile})
      .shape("sequence", sequence, {T})
      .shape("epoch", epoch, {2})
      .shape("logits", logits, {R, T, columns})
      .shape("token", token, {T})
      .shape("nan", nan, {T});
  *out = {T, H, R, columns, groups * H * 16};
  return check->ok();
}

}  // namespace muse::bindings
