// The fused step's two handlers on the CPU backend: check operands, join the gang, and, as the last device to arrive,
// run the step for all ranks.
#include "ffi/bindings/handler.h"
#include "ffi/bindings/registry.h"
#include "ffi/comm/gang.h"
#include "ffi/decode/step.h"

namespace muse::bindings {
namespace {

// Reads operands or results in order, checking type and shape.
template <typename Source>
class Reader {
 public:
  Reader(const Source& source, Check* check) : source_(source), check_(check) {}

  template <typename T>
  T* next(const char* name, ffi::DataType type, std::initializer_list<int64_t> shape) {
    const size_t at = index_++;
    if (!check_->ok()) return nullptr;
    auto buffer = fetch(at);
    if (!buffer.has_value()) {
      check_->that(false, std::string(name) + " is missing (operand or result " + std::to_string(at) + ")");
      return nullptr;
    }
    check_->that(buffer->element_type() == type, std::string(name) + " has the wrong element type")
        .shape(name, *buffer, shape);
    return static_cast<T*>(buffer->untyped_data());
  }

  ffi::Span<const int64_t> peek(size_t at) {
    auto buffer = fetch(at);
    return buffer.has_value() ? buffer->dimensions() : ffi::Span<const int64_t>();
  }

 private:
  std::optional<ffi::AnyBuffer> fetch(size_t at);
  const Source& source_;
  Check* check_;
  size_t index_ = 0;
};

template <>
std::optional<ffi::AnyBuffer> Reader<ffi::RemainingArgs>::fetch(size_t at) {
  const auto buffer = source_.get<ffi::AnyBuffer>(at);
  return buffer.has_value() ? std::optional<ffi::AnyBuffer>(*buffer) : std::nullopt;
}

template <>
std::optional<ffi::AnyBuffer> Reader<ffi::RemainingRets>::fetch(size_t at) {
  auto buffer = source_.get<ffi::AnyBuffer>(at);
  return buffer.has_value() ? std::optional<ffi::AnyBuffer>(**buffer) : std::nullopt;
}

// One device's view of a step.
struct LayersMember {
  StepCall call;  // rank pointers of its own ranks only
  std::vector<int32_t> ranks;
  int32_t* epoch;
  uint64_t digest;
};

// Bits of the attribute layer_kinds.
constexpr int32_t kFull = 1, kRope = 2, kNvfp4 = 4;

ffi::Future failed(const ffi::Error& error) {
  ffi::Promise promise;
  promise.SetError(error);
  return ffi::Future(promise);
}

// The order of these two attributes is the contract with muse_jax/decode/step.py.
bool read_plan(ffi::Span<const int64_t> dims, ffi::Span<const float> scalars, ffi::Span<const int32_t> kinds, Plan* p,
               Check* check) {
  check->that(dims.size() == 13, "attribute dims needs 13 numbers")
      .that(scalars.size() == 5, "attribute scalars needs 5");
  if (!check->ok()) return false;
  const int64_t* d = dims.begin();
  p->layers = d[0], p->hidden = d[1], p->q_heads = d[2], p->kv_heads = d[3], p->moe_hidden = d[4], p->moe_inner = d[5];
  p->experts = d[6], p->top_k = d[7], p->vocab = d[8], p->window = d[9], p->layer_begin = d[10], p->layer_end = d[11];
  p->quantize_activations = d[12] != 0;
  const float* s = scalars.begin();
  p->eps = s[0], p->post_eps = s[1], p->score_scale = s[2], p->router_multiplier = s[3], p->routed_scaling = s[4];
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
bool read_operands(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets, bool taps, Check* check,
                   LayersMember* member) {
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
  const int32_t* ranks = in.next<const int32_t>("ranks", DataType::S32, {R});
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
  const auto* w13_codes =
      in.next<const uint32_t>("w13_codes", DataType::U32, {R, lq, E, w13_groups, M / 16, kTileWords});
  const auto* w13_scales =
      in.next<const uint8_t>("w13_scales", DataType::F8E4M3FN, {R, lq, E, w13_groups, M / 16, kTileScales});
  const auto* w2_codes = in.next<const uint32_t>("w2_codes", DataType::U32, {R, lq, E, w2_groups, I / 16, kTileWords});
  const auto* w2_scales =
      in.next<const uint8_t>("w2_scales", DataType::F8E4M3FN, {R, lq, E, w2_groups, I / 16, kTileScales});
  s.scale_2 = in.next<const float>("scale_2", DataType::F32, {L, E, 3});
  s.input_scales = in.next<const float>("input_scales", DataType::F32, {L, 2});

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
  if (!check->ok()) return false;
  check->that(member->epoch == epoch, "epoch must be aliased to its result");
  for (int c = 0; c < 4; ++c)
    check->that(updated[c] == caches[c], std::string(cache_names[c]) + " must be aliased to its result");
  if (!check->ok()) return false;
  member->call.results.push_back(results);
  member->ranks.assign(ranks, ranks + R);

  for (int64_t i = 0; i < R; ++i) {
    if (ranks[i] < 0 || ranks[i] >= kRanks) continue;  // the gang reports it
    RankPointers& r = member->call.rank[ranks[i]];
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
    r.w13_codes = share(w13_codes, lq * w13_tiles * kTileWords);
    r.w13_scales = share(w13_scales, lq * w13_tiles * kTileScales);
    r.w2_codes = share(w2_codes, lq * w2_tiles * kTileWords);
    r.w2_scales = share(w2_scales, lq * w2_tiles * kTileScales);
    const int64_t per_layer = B * p.kv_rank() * kHeadDim;
    r.k_full = share(updated[0], full_shape[0] * per_layer * p.capacity);
    r.v_full = share(updated[1], full_shape[0] * per_layer * p.capacity);
    r.k_ring = share(updated[2], ring_shape[0] * per_layer * p.ring);
    r.v_ring = share(updated[3], ring_shape[0] * per_layer * p.ring);
  }
  return true;
}

// Joins `member` and, when it completes the gang, runs `work` on everybody's data and completes them.
template <typename Member, typename Work>
ffi::Future meet(const char* what, const GangKey& key, std::shared_ptr<Member> member, float limit, Work work) {
  ffi::Promise promise;
  ffi::Future future(promise);
  GangMember mine{member->ranks, member, [promise](const Status& status) mutable {
                    if (status.ok())
                      promise.SetAvailable();
                    else
                      promise.SetError(ffi::Error(ffi::ErrorCode::kInternal, status.message));
                  }};
  const std::vector<GangMember> members = join_gang(what, key, std::move(mine), limit);
  if (members.empty()) return future;
  Status status;
  try {
    const IeeeMode mode;
    std::vector<Member*> calls;
    for (const GangMember& m : members) calls.push_back(static_cast<Member*>(m.call.get()));
    status = work(calls);
  } catch (const std::exception& e) {
    status = {std::string(what) + ": " + e.what()};
  }
  complete_all(members, status);
  return future;
}

Status run_layers(const std::vector<LayersMember*>& members) {
  StepCall all = members[0]->call;
  all.results.clear();
  for (const LayersMember* m : members) {
    for (const int32_t r : m->ranks) all.rank[r] = m->call.rank[r];
    all.results.push_back(m->call.results[0]);
  }
  const Status status = decode_layers_cpu(all);
  for (const LayersMember* m : members) {
    // Copies of one state that were stepped differently are different states from here on.
    const uint64_t history = hash_bytes(m->digest, &m->epoch[0], sizeof(int32_t));
    m->epoch[0] = static_cast<int32_t>(static_cast<uint32_t>(history ^ history >> 32));
    m->epoch[1] += 1;
  }
  return status;
}

ffi::Future layers_impl(ffi::RunId run, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Span<const int64_t> dims,
                        ffi::Span<const float> scalars, ffi::Span<const int32_t> layer_kinds, bool taps,
                        float wait_limit) {
  try {
    Check check("decode_layers");
    auto member = std::make_shared<LayersMember>();
    Plan& p = member->call.plan;
    if (!read_plan(dims, scalars, layer_kinds, &p, &check) || !read_operands(args, rets, taps, &check, member.get()))
      return failed(check.error());
    const SharedPointers& s = member->call.shared;
    uint64_t digest = hash_bytes(0xCBF29CE484222325ull, dims.begin(), dims.size() * sizeof(int64_t));
    for (const int32_t* operand : {s.token, s.sequence, s.position})
      digest = hash_bytes(digest, operand, p.rows * sizeof(int32_t));
    digest = hash_bytes(digest, s.lengths, p.sequences * sizeof(int32_t));
    digest = hash_bytes(digest, s.ancestors, p.rows * p.rows);
    if (p.layer_begin > 0) digest = hash_bytes(digest, s.stream, p.rows * p.hidden * sizeof(float));
    member->digest = digest;
    const GangKey key{run.run_id, member->epoch[0], member->epoch[1], digest};
    return meet("decode_layers", key, member, wait_limit, run_layers);
  } catch (const std::exception& e) {
    return failed(invalid(std::string("decode_layers: ") + e.what()));
  }
}

struct HeadMember {
  HeadCall call;
  std::vector<int32_t> ranks;
};

Status run_head(const std::vector<HeadMember*>& members) {
  HeadCall all = members[0]->call;
  all.results.clear();
  for (const HeadMember* m : members) {
    for (const int32_t r : m->ranks) all.lm_head[r] = m->call.lm_head[r], all.logits[r] = m->call.logits[r];
    all.results.push_back(m->call.results[0]);
  }
  return decode_head_cpu(all);
}

ffi::Future head_impl(ffi::RunId run, S32 ranks, F32 stream, Bf16 gain, Bf16 lm_head, S32 sequence, S32 epoch,
                      ffi::Result<F32> logits, ffi::Result<S32> token, ffi::Result<ffi::Buffer<ffi::PRED>> nan,
                      int64_t vocab, float eps, float multiplier, float cap, float wait_limit) {
  try {
    Check check("decode_head");
    check.rank("ranks", ranks, 1).rank("stream", stream, 2).multiple("vocab_size", vocab, kRanks);
    if (!check.ok()) return failed(check.error());
    const int64_t R = ranks.dimensions()[0], T = stream.dimensions()[0], H = stream.dimensions()[1];
    const int64_t columns = vocab / kRanks, groups = (columns + 15) / 16;
    check.multiple("hidden_size", H, 128)
        .that(R > 0 && kRanks % R == 0, "ranks has " + std::to_string(R) + " entries, allowed: 1, 2, 4 or 8")
        .shape("gain", gain, {H})
        .shape("lm_head", lm_head, {R, groups, H / 16, kTile})
        .shape("sequence", sequence, {T})
        .shape("epoch", epoch, {2})
        .shape("logits", *logits, {R, T, columns})
        .shape("token", *token, {T})
        .shape("nan", *nan, {T});
    if (!check.ok()) return failed(check.error());
    auto member = std::make_shared<HeadMember>();
    member->call = {T,
                    H,
                    vocab,
                    eps,
                    multiplier,
                    cap,
                    stream.typed_data(),
                    bits(gain),
                    sequence.typed_data(),
                    {},
                    {},
                    {{token->typed_data(), nan->typed_data()}}};
    member->ranks.assign(ranks.typed_data(), ranks.typed_data() + R);
    for (int64_t i = 0; i < R; ++i) {
      const int32_t rank = ranks.typed_data()[i];
      if (rank < 0 || rank >= kRanks) continue;  // the gang reports it
      member->call.lm_head[rank] = bits(lm_head) + i * groups * H * 16;
      member->call.logits[rank] = logits->typed_data() + i * T * columns;
    }
    uint64_t digest = hash_bytes(0xCBF29CE484222325ull ^ 1, sequence.typed_data(), T * sizeof(int32_t));
    digest = hash_bytes(digest, stream.typed_data(), T * H * sizeof(float));
    const GangKey key{run.run_id, epoch.typed_data()[0], epoch.typed_data()[1], digest};
    return meet("decode_head", key, member, wait_limit, run_head);
  } catch (const std::exception& e) {
    return failed(invalid(std::string("decode_head: ") + e.what()));
  }
}

XLA_FFI_DEFINE_HANDLER(kLayers, layers_impl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::RunId>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<ffi::Span<const int64_t>>("dims")
                           .Attr<ffi::Span<const float>>("scalars")
                           .Attr<ffi::Span<const int32_t>>("layer_kinds")
                           .Attr<bool>("taps")
                           .Attr<float>("wait_limit"));
XLA_FFI_DEFINE_HANDLER(kHead, head_impl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::RunId>()
                           .Arg<S32>()
                           .Arg<F32>()
                           .Arg<Bf16>()
                           .Arg<Bf16>()
                           .Arg<S32>()
                           .Arg<S32>()
                           .Ret<F32>()
                           .Ret<S32>()
                           .Ret<ffi::Buffer<ffi::PRED>>()
                           .Attr<int64_t>("vocab")
                           .Attr<float>("eps")
                           .Attr<float>("multiplier")
                           .Attr<float>("cap")
                           .Attr<float>("wait_limit"));

}  // namespace

HandlerList decode_handlers() { return {{"muse_decode_layers_v1", kLayers}, {"muse_decode_head_v1", kHead}}; }

}  // namespace muse::bindings
