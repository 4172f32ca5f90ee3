// The fused decode step on a GPU: one launch for all layers. The blocks of a device are shared out among its ranks; a
// rank's blocks meet at barriers, ranks meet through slots (sync.cuh). The arithmetic is ffi/decode/cpu/layers.cc's,
// bit for bit.
#include <cuda_runtime.h>

#include <algorithm>

#include "ffi/decode/cuda/expert_steps.cuh"

namespace muse {
namespace {

// One block's run through the layers.
class Step : ExpertSteps {
 public:
  using ExpertSteps::epoch;
  using ExpertSteps::ExpertSteps;

  __device__ bool run() {
    resolve_rows(p_, a_.shared, s_.rows);
    if (s_.rows.bad) {
      if (place_.index == 0 && threadIdx.x == 0) give_up(place_, kBadRows, Phase::kEmbed, s_.rows.bad - 1);
      return false;
    }
    n_ = s_.rows.count;
    if (n_ == 0) return true;
    if (p_.layer_begin == 0) {
      if (!embed()) return false;
    } else {
      for (int i = place_.index; i < n_; i += place_.size)
        for (int64_t c = threadIdx.x; c < p_.hidden; c += kThreads)
          stream(i)[c] = a_.shared.stream[s_.rows.row[i] * p_.hidden + c];
    }
    if (p_.layer_begin < p_.layer_end) first_norm();
    for (int64_t l = p_.layer_begin; l < p_.layer_end; ++l) {
      place_.layer = static_cast<uint32_t>(l);
      ++place_.epoch;
      if (!rank_barrier(place_, Phase::kAttention)) return false;  // h is written
      if (!attention(l) || !moe(l)) return false;
    }
    store_stream();
    return rank_barrier(place_, Phase::kEnd);
  }
};

__global__ void __launch_bounds__(kThreads, 1) decode_layers(const __grid_constant__ LayersArgs args) {
  extern __shared__ __align__(16) unsigned char memory[];
  LayersShared& shared = *reinterpret_cast<LayersShared*>(memory);
  const uint32_t size = gridDim.x / args.local_count, which = blockIdx.x / size;
  const int rank = args.local[which];
  if (rank == args.silent_rank) return;
  Control* control = reinterpret_cast<Control*>(args.workspace[rank]);
  Place place{control,
              args.report[rank],
              now() + args.wait_limit_ns,
              static_cast<uint32_t>(rank),
              blockIdx.x % size,
              size,
              0,
              0,
              0};
  place.layer = static_cast<uint32_t>(args.plan.layer_begin);
  place.epoch = load_relaxed(&control->epoch);
  Step step(args, shared, place);
  // The last barrier lies behind every block's reading of the old epoch.
  if (step.run() && place.index == 0 && threadIdx.x == 0) {
    control->epoch = step.epoch();
    if (which == 0) args.epoch[1] += 1;
  }
}

}  // namespace

int64_t layers_shared_bytes(const Plan& plan) {
  const int64_t row_floats = std::max({2 * plan.hidden, plan.moe_hidden, kMaxRows * plan.top_k});
  return static_cast<int64_t>(sizeof(LayersShared)) + row_floats * static_cast<int64_t>(sizeof(float));
}

Status prepare_layers(const Plan& plan, int* blocks) {
  const auto fail = [](const char* what, cudaError_t e) {
    return Status{std::string("decode_layers: ") + what + ": " + cudaGetErrorString(e)};
  };
  if (plan.q_heads / plan.kv_heads > kMaxGroup)
    return {"decode_layers: " + std::to_string(plan.q_heads / plan.kv_heads) + " query heads per kv head, at most 16"};
  if (plan.experts > 1024) return {"decode_layers: " + std::to_string(plan.experts) + " experts, at most 1024"};
  const int64_t bytes = layers_shared_bytes(plan);
  cudaError_t e =
      cudaFuncSetAttribute(decode_layers, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (e != cudaSuccess) return fail(("a block needs " + std::to_string(bytes) + " bytes of shared memory").c_str(), e);
  int device = 0, multiprocessors = 0, per_multiprocessor = 0;
  if ((e = cudaGetDevice(&device)) != cudaSuccess) return fail("no device", e);
  if ((e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device)) != cudaSuccess)
    return fail("device", e);
  if ((e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, decode_layers, kThreads, bytes)) !=
      cudaSuccess)
    return fail("occupancy", e);
  *blocks = multiprocessors * (per_multiprocessor ? 1 : 0);
  return *blocks > 0 ? Status{} : Status{"decode_layers: a block does not fit on a multiprocessor"};
}

Status launch_layers(Stream stream, const LayersArgs& args, int blocks) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  cudaError_t e = cudaSuccess;
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
  for (int i = 0; i < args.local_count; ++i)
    clear(args.workspace[args.local[i]] + offsetof(Control, barrier), sizeof(Control::barrier));
  if (e == cudaSuccess) {
    const int grid = blocks / args.local_count * args.local_count;
    decode_layers<<<grid, kThreads, layers_shared_bytes(p), cuda_stream>>>(args);
    e = cudaGetLastError();
  }
  return e == cudaSuccess ? Status{} : Status{std::string("decode_layers: ") + cudaGetErrorString(e)};
}

}  // namespace muse
