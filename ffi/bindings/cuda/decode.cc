// The fused step's two handlers on the CUDA backend: check operands, look up the communicator, launch.
#include "ffi/bindings/decode_operands.h"
#include "ffi/bindings/handler.h"
#include "ffi/bindings/registry.h"
#include "ffi/comm/cuda/communicator.h"
#include "ffi/decode/cuda/launches.h"

namespace muse::bindings {
namespace {

// The communicator and this device's ranks, or what is wrong.
ffi::Error find_ranks(const char* op, int64_t key, int32_t device, int64_t expected, std::shared_ptr<Communicator>* out,
                      std::vector<int32_t>* ranks) {
  *out = Communicator::find(key);
  if (!*out)
    return invalid(std::string(op) + ": communicator " + std::to_string(key) +
                   " does not exist in this process or was closed; repack the weights with an open one");
  const std::string failure = (*out)->failure();
  if (!failure.empty())
    return ffi::Error(ffi::ErrorCode::kInternal,
                      std::string(op) + ": an earlier step failed (" + failure + "); rebuild the communicator");
  *ranks = (*out)->ranks_of(device);
  if (static_cast<int64_t>(ranks->size()) != expected)
    return invalid(std::string(op) + ": device " + std::to_string(device) + " holds " + std::to_string(ranks->size()) +
                   " ranks in the communicator but was given the weights of " + std::to_string(expected));
  return ffi::Error::Success();
}

StepArgs args_of(const Communicator& communicator, const Prepared& prepared, const Plan& plan,
                 const std::vector<int32_t>& ranks, float wait_limit) {
  StepArgs args{};
  args.plan = plan;
  args.offsets = workspace_of(plan);
  args.region_bytes = prepared.region_bytes;
  for (int r = 0; r < kRanks; ++r)
    args.workspace[r] = communicator.workspace(r), args.report[r] = communicator.report(r);
  for (size_t i = 0; i < ranks.size(); ++i) args.local[i] = ranks[i];
  args.local_count = static_cast<int32_t>(ranks.size());
  args.silent_rank = -1;
  args.loopback = communicator.loopback();
  args.wait_limit_ns = static_cast<uint64_t>(static_cast<double>(wait_limit) * 1e9);
  return args;
}

ffi::Error layers_impl(Stream stream, int32_t device, ffi::RemainingArgs operands, ffi::RemainingRets rets,
                       ffi::Span<const int64_t> dims, ffi::Span<const float> scalars,
                       ffi::Span<const int32_t> layer_kinds, bool taps, bool head, int64_t communicator_key,
                       int64_t silent_rank, float wait_limit) {
  return guarded("decode_layers", [&]() -> ffi::Error {
    Check check("decode_layers");
    LayersOperands in{};
    if (!read_layers(dims, scalars, layer_kinds, operands, rets, taps, head, &check, &in)) return check.error();
    const Plan& plan = in.call.plan;
    if (plan.layer_begin == plan.layer_end) return invalid("decode_layers: an empty layer range does not run on a GPU");
    std::shared_ptr<Communicator> communicator;
    std::vector<int32_t> ranks;
    ffi::Error error = find_ranks("decode_layers", communicator_key, device, in.count, &communicator, &ranks);
    if (error.failure()) return error;
    if (workspace_of(plan).bytes != communicator->workspace_bytes())
      return invalid("decode_layers: the communicator was made for a model of another shape");
    const Prepared& prepared = communicator->layers(device);
    StepArgs args = args_of(*communicator, prepared, plan, ranks, wait_limit);
    for (size_t i = 0; i < ranks.size(); ++i) args.rank[ranks[i]] = in.local[i];
    args.shared = in.call.shared;
    args.results = in.call.results[0];
    args.epoch = in.epoch;
    args.silent_rank = static_cast<int32_t>(silent_rank);
    args.head.multiplier = in.head.multiplier, args.head.cap = in.head.cap, args.head.gain = in.head.gain;
    args.head.token = in.head.token, args.head.nan = in.head.nan;
    if (head)
      share_head(ranks, in.head.lm_head, in.head.lm_head_elements, in.head.logits, plan.rows * plan.vocab_rank(),
                 &args.head);
    return to_error(launch_layers(stream, args, prepared.blocks));
  });
}

ffi::Error head_impl(Stream stream, int32_t device, S32 ranks_operand, F32 x, Bf16 gain, Bf16 lm_head, S32 sequence,
                     S32 epoch, ffi::Result<F32> logits, ffi::Result<S32> token,
                     ffi::Result<ffi::Buffer<ffi::PRED>> nan, int64_t vocab, float eps, float multiplier, float cap,
                     int64_t communicator_key, float wait_limit) {
  return guarded("decode_head", [&]() -> ffi::Error {
    Check check("decode_head");
    HeadShape shape{};
    if (!read_head(ranks_operand, x, gain, lm_head, sequence, epoch, *logits, *token, *nan, vocab, &check, &shape))
      return check.error();
    std::shared_ptr<Communicator> communicator;
    std::vector<int32_t> ranks;
    ffi::Error error = find_ranks("decode_head", communicator_key, device, shape.count, &communicator, &ranks);
    if (error.failure()) return error;
    Plan plan{};  // the offsets that the head uses depend on the hidden size alone
    plan.rows = shape.rows, plan.hidden = shape.hidden, plan.vocab = vocab, plan.eps = eps;
    const Prepared& prepared = communicator->head(device);
    StepArgs args = args_of(*communicator, prepared, plan, ranks, wait_limit);
    args.shared.stream = x.typed_data(), args.shared.sequence = sequence.typed_data();
    args.head.multiplier = multiplier, args.head.cap = cap, args.head.gain = bits(gain);
    share_head(ranks, bits(lm_head), shape.lm_head_elements, logits->typed_data(), shape.rows * shape.columns,
               &args.head);
    args.head.token = token->typed_data(), args.head.nan = nan->typed_data();
    return to_error(launch_head(stream, args, prepared.blocks));
  });
}

// Graph capture is safe: memsets and one kernel on the given stream, and every address outside the operands is the
// communicator's, which never moves.
XLA_FFI_DEFINE_HANDLER(kLayers, layers_impl,
                       ffi::Ffi::Bind()
                           .Ctx<StreamContext>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<ffi::Span<const int64_t>>("dims")
                           .Attr<ffi::Span<const float>>("scalars")
                           .Attr<ffi::Span<const int32_t>>("layer_kinds")
                           .Attr<bool>("taps")
                           .Attr<bool>("head")
                           .Attr<int64_t>("communicator")
                           .Attr<int64_t>("silent_rank")
                           .Attr<float>("wait_limit"),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kHead, head_impl,
                       ffi::Ffi::Bind()
                           .Ctx<StreamContext>()
                           .Ctx<ffi::DeviceOrdinal>()
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
                           .Attr<int64_t>("communicator")
                           .Attr<float>("wait_limit"),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

HandlerList decode_handlers() { return {{"muse_decode_layers_v1", kLayers}, {"muse_decode_head_v1", kHead}}; }

}  // namespace muse::bindings
