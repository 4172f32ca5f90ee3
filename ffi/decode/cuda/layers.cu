// The fused decode step on a GPU: one launch for all layers and, where the call asks for it, the head. The blocks of a
// device are shared out among its ranks; blocks and ranks meet through slots (sync.cuh); in every block one warp
// streams weights, three finish what the experts' chains made, and the others compute. The arithmetic is
// ffi/decode/cpu/layers.cc's, bit for bit.
#include <algorithm>

#include "ffi/decode/cuda/expert_steps.cuh"
#include "ffi/decode/cuda/launch.h"
#include "ffi/decode/cuda/place.cuh"
#include "ffi/decode/cuda/producer.cuh"

namespace muse {
namespace {

// The computing warps' run through the layers. Between phases: slots that were waited for.
// Which layer and which GEMM it is stands in shared memory, and nothing else lasts longer than a phase: the experts'
// chains take all registers, and what their callers kept would be spilled.
class Step : public ExpertSteps {
 public:
  using ExpertSteps::ExpertSteps;

  __device__ bool run() {
    if (!run_phase<&Step::start>()) return false;
    if (rows() == 0) return a_.head.token && run_phase<&HeadSteps::run>();  // which is false
    mark(Mark::kStart);
    while (layer() < p_.layer_end) {
      if (!run_phase<&Step::gemm>()) return false;  // one call for all: registers are few
      const Gemm next = s_.gemm;
      if (next == Gemm::kGates) continue;
      if (next == Gemm::kOutput) {
        attention();
      } else if (next == Gemm::kPostExpert) {
        if (!moe()) return false;
      } else {
        if (!row_parallel()) return false;
        if (s_.gemm == Gemm::kQkv) next_layer();
      }
    }
    return rank_barrier(Phase::kEnd) && (!a_.head.token || run_phase<&HeadSteps::run>());
  }

 private:
  // From the sums of q, k, v and u to what o_proj multiplies.
  __device__ void attention() {
    mark(Mark::kProject);
    run_phase<&Step::finish_heads>();
    run_phase<&Step::arrive>();  // all have read the epoch
    next_epoch();                // the sums of squares that were waited for are of the layer before
    mark(Mark::kHeads);
    run_phase<&Step::attend_rows>();
    run_phase<&Step::finish_rows>();
    mark(Mark::kAttend);
  }

  // From the pooled rows' sums to the experts' outputs.
  __device__ bool moe() {
    run_phase<&Step::push_pooled>();
    mark(Mark::kPool);
    if (!run_phase<&Step::route_rows>()) return false;
    mark(Mark::kRoute);
    run_phase<&Step::arrive>();
    if (!run_phase<&Step::group_pairs>()) return false;
    ring_.experts_known();
    mark(Mark::kGroup);
    experts();
    mark(Mark::kFirst);
    sync_block();                        // all know that it is the second
    run_phase<&Step::prepare_terms>(0);  // while hidden rows come
    experts();
    mark(Mark::kSecond);
    return true;
  }

  __device__ void experts() {
    if (expert_kind() != ExpertKind::kW4A4) run_phase<&Step::wait_tokens>();
    mark(Mark::kTokens);
    if (thread_index() == 0) ring_.set_streaming(true);
    units_.begin();
    const ExpertKind kind = expert_kind();
    if (kind == ExpertKind::kW4A4)
      run_phase<&Step::expert_chains<ExpertKind::kW4A4>>();
    else if (kind == ExpertKind::kW4A16)
      run_phase<&Step::expert_chains<ExpertKind::kW4A16>>();
    else
      run_phase<&Step::expert_chains<ExpertKind::kBf16>>();
    run_phase<&Step::end_experts>();
  }

  // A row-parallel GEMM's branch into the stream.
  __device__ bool row_parallel() {
    mark(Mark::kOutput);
    run_phase<&Step::reduce>();
    mark(Mark::kReduce);
    if (!run_phase<&Step::branch>()) return false;
    mark(Mark::kBranch);
    return true;
  }

  __device__ void next_layer() {
    sync_block();
    if (thread_index() == 0) ++place_.layer;
    sync_block();
  }
};

// A layer's norms, gates and router rows are read directly, by few blocks and with nothing to hide their latency: every
// block brings its part into L2.
__device__ __forceinline__ void prefetch_small(const StepArgs& a, const Place& place, int l) {
  const Plan& p = a.plan;
  const int h = static_cast<int>(p.hidden), m = static_cast<int>(p.moe_hidden),
            of_router = 4 * h * static_cast<int>(p.experts_rank());
  constexpr int kPiece = 2048;
#pragma unroll 1
  for (int which = 0; which < 4; ++which) {
    const void* data = which == 0   ? static_cast<const void*>(a.rank[place.rank].router)
                       : which == 1 ? static_cast<const void*>(a.shared.gates)
                       : which == 2 ? a.shared.hidden_gains
                                    : a.shared.moe_gains;
    const int bytes = which == 0 ? of_router : which == 1 ? 16 * h : which == 2 ? 6 * h : 4 * m;
    const unsigned char* from = static_cast<const unsigned char*>(data) + int64_t{l} * bytes;
    // The blocks take turns: equal shares would be two divisions.
#pragma unroll 1
    for (int at = place.index + threadIdx.x % 32 * place.size; at < bytes / kPiece; at += 32 * place.size)
      ptx::bulk_prefetch_l2(from + at * kPiece, kPiece);
  }
}

// The producer's: the weights of all layers in the order of Step's phases, then the head's.
__device__ __noinline__ void stream_weights(BlockShared& s) {
  const Plan& p = s.args.plan;
  Producer producer(s);
  const int passes = (s.rows.count + kPassRows - 1) / kPassRows, begin = static_cast<int>(p.layer_begin),
            end = static_cast<int>(p.layer_end);
#pragma unroll 1
  for (int l = begin; l < end + (s.args.head.token != nullptr); ++l) {
    const bool head = l == end;
    if (!head) prefetch_small(s.args, s.place, l);
#pragma unroll 1  // one copy of the code
    for (int stage = head ? kStages - 1 : 0; stage < kStages; ++stage) {
      if (stage == kExpertStage && !producer.wait_experts_known(static_cast<uint32_t>(l - begin))) return;
      const bool second = stage == kExpertStage + 1;
      Producer::Reading what;
      if (stage == kExpertStage || second) {
        const LayerKind kind = p.kind[l];
        what = Producer::experts(s.jobs.experts[kind.nvfp4][second], s.expert_units[second],
                                 kind.experts * static_cast<int>(p.experts));
      } else {
        const int dense = head ? kHeadJob : min(stage, kDenseGemms - 1);
        what = Producer::dense(s.jobs.dense[dense], s.jobs.tasks[dense], head ? 0 : l, passes);
      }
      if (!producer.stream(what)) return;
    }
  }
}

__global__ void __launch_bounds__(kLaunchThreads, 1) decode_layers(const __grid_constant__ StepArgs args) {
  BlockShared& shared = block_shared();
  start_block(args, shared);
  if (args.head.token && threadIdx.x == 0) plan_head(args, shared);
  if (threadIdx.x < kThreads) {
    resolve_rows(args.plan, args.shared, shared.rows);
    if (!shared.rows.bad)
      schedule_attention(args.plan, shared.rows, static_cast<int>(shared.place.size), shared.attention);
  }
  __syncthreads();
  const Place& place = shared.place;
  if (static_cast<int32_t>(place.rank) == args.silent_rank) return;
  const bool work = !shared.rows.bad && !place.gave_up;
  if (threadIdx.x < kThreads) {
    if (shared.rows.bad && place.index == 0 && threadIdx.x == 0)
      give_up(place, kBadRows, Phase::kEmbed, shared.rows.bad - 1);
    Step step(shared);
    if (work && step.run() && place.index == 0 && threadIdx.x == 0) {
      finish_launch(place);
      if (static_cast<int32_t>(place.rank) == args.local[0]) args.epoch[1] += 1;
    }
  } else if (threadIdx.x / 32 == kProducer) {
    if (work && shared.rows.count > 0) stream_weights(shared);
    Ring(shared.ring).drain(threadIdx.x % 32);
  } else if (work && shared.rows.count > 0) {
    run_phase<&Step::finish_all>();
  }
  __syncthreads();  // the producer's copies have landed
}

int64_t region_bytes(const Plan& p) {
  return std::max<int64_t>({dense_operand_bytes(p.hidden) + kHeldRouterRows * p.hidden / kSegments * 4,
                            row_parallel_operand_bytes(p.q_columns()), row_parallel_operand_bytes(p.moe_columns()),
                            p.hidden * 6 + p.hidden / kRanks * 12,  // a row, its gains; a segment's stream and gates
                            static_cast<int64_t>(sizeof(AttentionShared)),
                            std::max<int64_t>(sizeof(float) * 2368, p.moe_hidden * 4),  // router
                            kMaxPairs * 4 + 16 + kMaxPairs / 8,                         // pairs by expert
                            int64_t{kUnits} * kUnitSumBytes + kWarps * static_cast<int64_t>(sizeof(ChunkScales))});
}

}  // namespace

Status prepare_layers(const Plan& plan, Prepared* prepared) {
  const int64_t tiles = plan.layers * (std::max(plan.qkvu_rows(), plan.moe_columns()) / 16) * (plan.hidden / 16);
  if (tiles > INT32_MAX)
    return {"decode_layers: a dense weight of " + std::to_string(tiles) +
            " tiles of 16 x 16, fewer than 2^31 expected"};
  const int64_t groups = std::max(plan.inner_columns(), plan.moe_columns()) / 16;  // of an expert GEMM, at most
  if (kMaxPairs * groups * groups > UINT32_MAX)
    return {"decode_layers: experts of " + std::to_string(groups) + " row groups per rank, fewer than 2048 expected"};
  constexpr int64_t kManyBlocks = 256;  // more than any GPU's; shares of the weighted sum are found by a Divisor
  if (kPassRows * (plan.moe_columns() / 2) * kManyBlocks * kManyBlocks > UINT32_MAX)
    return {"decode_layers: " + std::to_string(plan.moe_columns()) +
            " columns of the experts' outputs per rank, fewer than 8192 expected"};
  if (plan.q_heads / plan.kv_heads > kMaxGroup)
    return {"decode_layers: " + std::to_string(plan.q_heads / plan.kv_heads) + " query heads per kv head, at most " +
            std::to_string(kMaxGroup)};
  if (plan.experts > 1024) return {"decode_layers: " + std::to_string(plan.experts) + " experts, at most 1024"};
  return prepare_kernel("decode_layers", decode_layers, sizeof(BlockShared), region_bytes(plan), prepared);
}

Status launch_layers(Stream stream, const StepArgs& args, int blocks) {
  const cudaStream_t queue = cuda_stream(stream);
  const Plan& p = args.plan;
  const int64_t run = p.layer_end - p.layer_begin;
  cudaError_t e = fill_with_ones(args.results.stream, p.rows * p.hidden * 4, queue);
  if (e == cudaSuccess && args.results.tap_residuals) {
    e = fill_with_ones(args.results.tap_residuals, run * 2 * p.rows * p.hidden * 4, queue);
    if (e == cudaSuccess) e = fill_with_ones(args.results.tap_experts, run * p.rows * p.top_k * 4, queue);
    if (e == cudaSuccess) e = fill_with_ones(args.results.tap_weights, run * p.rows * p.top_k * 4, queue);
  }
  if (e == cudaSuccess && args.head.token) e = clear_head(args, queue);
  if (e == cudaSuccess) e = launch_fused(decode_layers, args, blocks, sizeof(BlockShared), stream);
  return cuda_status("decode_layers", e);
}

}  // namespace muse
