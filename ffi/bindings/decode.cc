// The fused step's two handlers on the CPU backend: check operands, join the gang, and, as the last device to arrive,
// run the step for all ranks.
#include "ffi/bindings/decode_operands.h"
#include "ffi/bindings/handler.h"
#include "ffi/bindings/registry.h"
#include "ffi/comm/gang.h"

namespace muse::bindings {
namespace {

struct LayersMember {
  LayersOperands operands;
  std::vector<int32_t> ranks;
  uint64_t digest;
};

ffi::Future failed(const ffi::Error& error) {
  ffi::Promise promise;
  promise.SetError(error);
  return ffi::Future(promise);
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
  if (!status.ok()) fail_run(key.run_id, status);
  complete_all(members, status);
  return future;
}

// The head of a call that goes on to it.
Status head_behind(const std::vector<LayersMember*>& members) {
  const StepCall& first = members[0]->operands.call;
  const Plan& p = first.plan;
  const auto& shared = members[0]->operands.head;
  HeadCall all{p.rows,
               p.hidden,
               p.vocab,
               p.eps,
               shared.multiplier,
               shared.cap,
               first.results[0].stream,
               shared.gain,
               first.shared.sequence,
               {},
               {},
               {}};
  for (const LayersMember* m : members) {
    const auto& head = m->operands.head;
    share_head(m->ranks, head.lm_head, head.lm_head_elements, head.logits, p.rows * p.vocab_rank(), &all);
    all.results.push_back({head.token, head.nan});
  }
  return decode_head_cpu(all);
}

Status run_layers(const std::vector<LayersMember*>& members) {
  StepCall all = members[0]->operands.call;
  all.results.clear();
  for (const LayersMember* m : members) {
    for (size_t i = 0; i < m->ranks.size(); ++i) all.rank[m->ranks[i]] = m->operands.local[i];
    all.results.push_back(m->operands.call.results[0]);
  }
  Status status = decode_layers_cpu(all);
  if (status.ok() && members[0]->operands.head.token) status = head_behind(members);
  for (const LayersMember* m : members) {
    // Two steps that fork one state must not be taken for each other later: the id remembers what was done.
    int32_t* epoch = m->operands.epoch;
    epoch[0] = static_cast<int32_t>(hash_bytes(m->digest, &epoch[0], sizeof(epoch[0])));
    epoch[1] += 1;
  }
  return status;
}

ffi::Future layers_impl(ffi::RunId run, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Span<const int64_t> dims,
                        ffi::Span<const float> scalars, ffi::Span<const int32_t> layer_kinds, bool taps, bool head,
                        int64_t, int64_t silent_rank, float wait_limit) {
  try {
    Check check("decode_layers");
    auto member = std::make_shared<LayersMember>();
    if (!read_layers(dims, scalars, layer_kinds, args, rets, taps, head, &check, &member->operands))
      return failed(check.error());
    const Plan& p = member->operands.call.plan;
    const SharedPointers& s = member->operands.call.shared;
    for (int64_t i = 0; i < member->operands.count; ++i)  // without a silent rank the gang never completes
      if (member->operands.ranks[2 * i] != silent_rank) member->ranks.push_back(member->operands.ranks[2 * i]);
    uint64_t digest = hash_bytes(0xCBF29CE484222325ull, dims.begin(), dims.size() * sizeof(int64_t));
    digest = hash_bytes(digest, &member->operands.ranks[1], sizeof(int32_t));  // the packing
    digest = hash_bytes(digest, &head, sizeof(head));
    for (const int32_t* operand : {s.token, s.sequence, s.position})
      digest = hash_bytes(digest, operand, p.rows * sizeof(int32_t));
    digest = hash_bytes(digest, s.lengths, p.sequences * sizeof(int32_t));
    digest = hash_bytes(digest, s.ancestors, p.rows * p.rows);
    if (p.layer_begin > 0) digest = hash_bytes(digest, s.stream, p.rows * p.hidden * sizeof(float));
    member->digest = digest;
    const GangKey key{run.run_id, member->operands.epoch[0], member->operands.epoch[1], digest};
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
                      int64_t vocab, float eps, float multiplier, float cap, int64_t, float wait_limit) {
  try {
    Check check("decode_head");
    HeadShape shape{};
    if (!read_head(ranks, stream, gain, lm_head, sequence, epoch, *logits, *token, *nan, vocab, &check, &shape))
      return failed(check.error());
    const int64_t R = shape.count, T = shape.rows, H = shape.hidden;
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
    for (int64_t i = 0; i < R; ++i) {
      const int32_t rank = ranks.typed_data()[2 * i];
      member->ranks.push_back(rank);
      if (rank < 0 || rank >= kRanks) continue;  // the gang reports it
      member->call.lm_head[rank] = bits(lm_head) + i * shape.lm_head_elements;
      member->call.logits[rank] = logits->typed_data() + i * T * shape.columns;
    }
    uint64_t digest = hash_bytes(0xCBF29CE484222325ull ^ 1, sequence.typed_data(), T * sizeof(int32_t));
    digest = hash_bytes(digest, stream.typed_data(), T * H * sizeof(float));
    digest = hash_bytes(digest, &ranks.typed_data()[1], sizeof(int32_t));  // the packing
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
                           .Attr<bool>("head")
                           .Attr<int64_t>("communicator")  // of the CUDA handler
                           .Attr<int64_t>("silent_rank")
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
                           .Attr<int64_t>("communicator")  // of the CUDA handler
                           .Attr<float>("wait_limit"));

}  // namespace

HandlerList decode_handlers() { return {{"muse_decode_layers_v1", kLayers}, {"muse_decode_head_v1", kHead}}; }

}  // namespace muse::bindings
