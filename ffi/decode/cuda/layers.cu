// The fused decode step on a GPU: one launch for all layers. The blocks of a device are shared out among its ranks; a
// rank's blocks meet at barriers, ranks meet through slots (sync.cuh); in every block one warp streams weights and the
// others compute. The arithmetic is ffi/decode/cpu/layers.cc's, bit for bit.
#include <algorithm>

#include "ffi/decode/cuda/expert_steps.cuh"
#include "ffi/decode/cuda/launch.h"
#include "ffi/decode/cuda/place.cuh"
#include "ffi/decode/cuda/producer.cuh"

namespace muse {
namespace {

// The computing warps' run through the layers.
class Step : ExpertSteps {
 public:
  using ExpertSteps::ExpertSteps;

  __device__ bool run() {
    if (!start()) return false;
    for (int64_t l = p_.layer_begin; l < p_.layer_end; ++l) {
      if (threadIdx.x == 0) s_.place.layer = static_cast<uint32_t>(l);
      next_epoch();
#pragma unroll 1  // one copy of the code
      for (int which = 0; which < 2; ++which) {
        if (!rank_barrier(which ? Phase::kRouter : Phase::kAttention)) return false;  // h is written
        if (!(which ? moe(l) : attention(l))) return false;
        const DenseJob job = which ? post_expert_job(p_, weights(), l) : o_job(p_, weights(), l);
        const int64_t width = which ? p_.moe_columns() : p_.q_columns();
        if (!row_parallel(job, mine<uint16_t>(which ? w_.combined : w_.o), width, which,
                          which ? Phase::kCombine : Phase::kOutput) ||
            !branch(l, which))
          return false;
      }
    }
    store_stream();
    return rank_barrier(Phase::kEnd);
  }
};

// The producer's: the weights of all layers in the order of Step's phases.
__device__ void stream_weights(BlockShared& s) {
  const Plan& p = s.args.plan;
  const Place& place = s.place;
  const RankPointers& w = s.args.rank[place.rank];
  Producer producer(s.ring, place.index, place.size);
  const int passes = (s.rows.count + kPassRows - 1) / kPassRows;
  const Range router = part(p.experts_rank() * kSegments, place.index, place.size);
  const int64_t length = p.hidden / kSegments;
  for (int64_t l = p.layer_begin; l < p.layer_end; ++l) {
    if (!producer.dense(qkvu_job(p, w, l), passes) || !producer.dense(o_job(p, w, l), passes)) break;
    for (int32_t task = router.begin; task < router.end; ++task)  // read directly, so only into L2
      producer.prefetch(w.router + p.router(l) + task % p.experts_rank() * p.hidden +
                            task / p.experts_rank() * length,
                        static_cast<uint32_t>(length * sizeof(float)));
    if (!producer.dense(pre_expert_job(p, w, l), passes)) break;
    if (!producer.wait_experts_known(static_cast<uint32_t>(l - p.layer_begin))) break;
    if (!producer.experts(expert_job(p, w, s.args.region_bytes, l, false), s.expert, s.slices) ||
        !producer.experts(expert_job(p, w, s.args.region_bytes, l, true), s.expert, s.slices) ||
        !producer.dense(post_expert_job(p, w, l), passes))
      break;
  }
  producer.finish();
}

__global__ void __launch_bounds__(kLaunchThreads, 1) decode_layers(const __grid_constant__ StepArgs args) {
  extern __shared__ __align__(128) unsigned char memory[];
  BlockShared& shared = *reinterpret_cast<BlockShared*>(memory);
  start_block(args, shared);
  if (threadIdx.x < kThreads) resolve_rows(args.plan, args.shared, shared.rows);
  __syncthreads();
  const Place& place = shared.place;
  if (static_cast<int32_t>(place.rank) == args.silent_rank) return;
  const bool work = !shared.rows.bad && shared.rows.count > 0;
  if (threadIdx.x < kThreads) {
    take_registers<kComputeRegisters>();
    if (shared.rows.bad && place.index == 0 && threadIdx.x == 0)
      give_up(place, kBadRows, Phase::kEmbed, shared.rows.bad - 1);
    Step step(shared);
    // The last barrier lies behind every block's reading of the old epoch.
    if (work && step.run() && place.index == 0 && threadIdx.x == 0) {
      place.control->epoch = place.epoch;
      if (static_cast<int32_t>(place.rank) == args.local[0]) args.epoch[1] += 1;
    }
  } else {
    give_registers<kProducerRegisters>();
    if (work && threadIdx.x == kThreads) stream_weights(shared);
  }
  __syncthreads();  // the producer's copies have landed
}

int64_t region_bytes(const Plan& p) {
  const int64_t group = p.q_heads / p.kv_heads;
  return std::max<int64_t>({dense_operand_bytes(p.hidden), row_parallel_operand_bytes(p.q_columns()),
                   row_parallel_operand_bytes(p.moe_columns()),
                   2 * p.hidden * 4,                                                       // a row and its branch
                   (kWarps + 1) * group * (kHeadDim + 1) * 4 + group * kHeadDim * 2,       // attention
                   static_cast<int64_t>(sizeof(float) * 2048 + 256) + p.moe_hidden * 4,    // router
                   p.experts * 8 + kMaxPairs * 2,                                          // pairs by expert
                   int64_t{kMinUnits} * kUnitSumBytes});
}

}  // namespace

Status prepare_layers(const Plan& plan, Prepared* prepared) {
  if (plan.q_heads / plan.kv_heads > kMaxGroup)
    return {"decode_layers: " + std::to_string(plan.q_heads / plan.kv_heads) + " query heads per kv head, at most " +
            std::to_string(kMaxGroup)};
  if (plan.experts > 1024) return {"decode_layers: " + std::to_string(plan.experts) + " experts, at most 1024"};
  return prepare_kernel("decode_layers", decode_layers, sizeof(BlockShared), region_bytes(plan), prepared);
}

Status launch_layers(Stream stream, const StepArgs& args, int blocks) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  cudaError_t e = clear_barriers(args, cuda_stream);
  // Inactive rows read as zeros.
  const Plan& p = args.plan;
  const int64_t run = p.layer_end - p.layer_begin;
  const auto clear = [&](void* data, int64_t bytes) {
    if (e == cudaSuccess && data && bytes) e = cudaMemsetAsync(data, 0, bytes, cuda_stream);
  };
  clear(args.results.stream, p.rows * p.hidden * 4);
  if (args.results.tap_residuals) {
    clear(args.results.tap_residuals, run * 2 * p.rows * p.hidden * 4);
    clear(args.results.tap_experts, run * p.rows * p.top_k * 4);
    clear(args.results.tap_weights, run * p.rows * p.top_k * 4);
  }
  if (e == cudaSuccess) {
    const int grid = blocks / args.local_count * args.local_count;
    decode_layers<<<grid, kLaunchThreads, sizeof(BlockShared) + args.region_bytes, cuda_stream>>>(args);
    e = cudaGetLastError();
  }
  return e == cudaSuccess ? Status{} : Status{std::string("decode_layers: ") + cudaGetErrorString(e)};
}

}  // namespace muse
