// A whole draft on a GPU in one launch: one block per multiprocessor, all resident at once, which meet at barriers
// between the phases. The arithmetic is ffi/draft/cpu/draft.cc's, bit for bit.
#include <algorithm>

#include "ffi/draft/cuda/attention.cuh"
#include "ffi/draft/cuda/choose.cuh"
#include "ffi/draft/cuda/gemm.cuh"
#include "ffi/draft/cuda/rows.cuh"
#include "ffi/ops/launch.cuh"

namespace muse {
namespace {

constexpr uint64_t kWaitLimit = 10'000'000'000;  // ns

// The table of GEMMs in the order in which they run.
class Table {
 public:
  __device__ explicit Table(DraftShared& shared) : c_(shared.call), s_(shared) {}

  __device__ void make() {
    const DraftPlan& p = c_.plan;
    const int h = static_cast<int>(p.hidden), q = static_cast<int>(p.q_columns()),
              kv = static_cast<int>(p.kv_columns());
    const int inner = static_cast<int>(p.inner), fed = static_cast<int>(p.batch * p.fed),
              rows = static_cast<int>(p.rows());
    const DraftWorkspace& w = s_.offsets;
    add(c_.fc, w.branch, 0, h, h);
    job(static_cast<int>(p.taps) * h, fed, 0);
    for (int l = 0; l < p.layers; ++l) {
      add(c_.layer[l].k, w.projected, 2 * l * kv, kv, 2 * static_cast<int>(p.layers) * kv);
      add(c_.layer[l].v, w.projected, (2 * l + 1) * kv, kv, 2 * static_cast<int>(p.layers) * kv);
    }
    job(h, fed, 0);
    for (int l = 0; l < p.layers && p.width > 0; ++l) {
      const DraftLayer& layer = c_.layer[l];
      const int all = q + 2 * kv, conv = static_cast<int>(p.conv_rows());
      if (conv) add(layer.attention.projection, w.coefficients, 0, conv, conv), job(h, rows, 0);
      add(layer.q, w.projected, 0, q, all), add(layer.k, w.projected, q, kv, all);
      add(layer.v, w.projected, q + kv, kv, all), job(h, rows, 0);
      add(layer.o, w.branch, 0, h, h), job(q, rows, 0);
      if (conv) add(layer.mlp.projection, w.coefficients, 0, conv, conv), job(h, rows, 0);
      add(layer.gate, 0, 0, inner, 0), add(layer.up, 0, 0, inner, 0), job(h, rows, 0, DraftOutput::kSwiglu);
      add(layer.down, w.branch, 0, h, h), job(inner, rows, 1);
    }
    if (p.width > 0) {
      s_.matrix[matrices_++] = {c_.head, c_.workspace + w.logits, static_cast<int>(p.vocab), static_cast<int>(p.vocab)};
      if (p.is_v2()) add(c_.selector, w.gate, 0, static_cast<int>(p.rank), static_cast<int>(p.rank));
      job(h, static_cast<int>(p.batch * p.places()), 0, DraftOutput::kHead);
    }
    s_.jobs = jobs_, s_.job = 0, s_.slot = 0;
  }

 private:
  __device__ void add(const uint16_t* weights, int64_t offset, int column, int rows, int stride) {
    s_.matrix[matrices_++] = {weights, reinterpret_cast<uint16_t*>(c_.workspace + offset) + column, rows, stride};
  }
  // A GEMM of the matrices that were added since the last.
  __device__ void job(int inner, int tokens, int operand, DraftOutput output = DraftOutput::kBf16) {
    int groups = 0;
    for (int m = first_; m < matrices_; ++m) groups += (s_.matrix[m].rows + 15) / 16;
    s_.table[jobs_++] = {first_, groups, inner, tokens, operand, output};
    first_ = matrices_;
  }

  const DraftCall& c_;
  DraftShared& s_;
  int matrices_ = 0, first_ = 0, jobs_ = 0;
};

__device__ __noinline__ void make_table() { Table(draft_shared()).make(); }

// Runs a phase as a function of its own, so that registers are shared out phase by phase. Which layer and which GEMM it
// is stands in shared memory: what callers keep would be spilled.
template <auto kPhase, typename Steps, typename... Args>
__device__ __noinline__ void phase_of(void (Steps::*)(Args...), Args... args) {
  (Steps(draft_shared()).*kPhase)(args...);
}
template <auto kPhase, typename... Args>
__device__ __forceinline__ void phase(Args... args) {
  phase_of<kPhase>(kPhase, args...);
}

// All blocks meet. False: one of them gave up, leave the kernel.
__device__ __forceinline__ bool meet() { return rank_barrier(draft_shared().place, Phase::kHead); }

// The next GEMM of the table, and all blocks after it.
__device__ __forceinline__ bool gemm() {
  phase<&DraftGemm::run>();
  return meet();
}

// A sublayer's first GEMM, behind its convolution.
__device__ __forceinline__ bool convolve(bool mlp) {
  phase<&DraftRows::convolve_input>(mlp);
  return meet();
}
__device__ __forceinline__ bool project(bool mlp) {
  return draft_shared().call.plan.group ? gemm() && convolve(mlp) && gemm() : gemm();
}

__device__ __forceinline__ bool layer() {
  if (!project(false)) return false;
  phase<&DraftRows::finish_heads>();
  if (!meet()) return false;
  phase<&DraftAttention::chunks>();
  if (!meet()) return false;
  phase<&DraftAttention::combine>();
  if (!meet() || !gemm()) return false;
  phase<&DraftRows::add_and_norm>(After::kAttention);
  if (!meet() || !project(true) || !gemm()) return false;
  phase<&DraftRows::add_and_norm>(After::kMlp);
  return meet();
}

__device__ __noinline__ void run() {
  phase<&DraftRows::begin>();
  if (!meet() || !gemm()) return;
  phase<&DraftRows::norm_features>();
  if (!meet() || !gemm()) return;
  phase<&DraftRows::inject>();
  DraftShared& s = draft_shared();
  if (s.call.plan.width == 0) return;
  sync_block();
  phase<&DraftRows::add_and_norm>(After::kNothing);
  if (!meet()) return;
#pragma unroll 1
  while (s.place.layer < s.call.plan.layers) {
    if (!layer()) return;
    if (threadIdx.x == 0) ++s.place.layer;
    sync_block();
  }
  phase<&DraftGemm::run>();
  phase<&DraftChoice::best_of_block>();
  if (!meet()) return;
  phase<&DraftChoice::best_of_all>();
  if (!meet()) return;
  phase<&DraftChoice::edges>();
  if (!meet()) return;
  phase<&DraftChoice::trees>();
}

__global__ void __launch_bounds__(kThreads, 1) draft_kernel(const __grid_constant__ DraftCall call) {
  DraftShared& s = draft_shared();
  for (uint32_t i = threadIdx.x; i < sizeof(DraftCall) / 4; i += kThreads)
    reinterpret_cast<uint32_t*>(&s.call)[i] = reinterpret_cast<const uint32_t*>(&call)[i];
  if (threadIdx.x < kWarps) s.fetch[threadIdx.x] = {-1};  // nothing to be fetched yet
  sync_block();
  if (threadIdx.x == 0) {
    s.offsets = draft_workspace(call.plan);
    auto* control = reinterpret_cast<Control*>(call.workspace + s.offsets.control);
    for (int r = 0; r < kRanks; ++r) s.workspaces[r] = reinterpret_cast<unsigned char*>(control);
    Place& place = s.place;
    place.workspace = s.workspaces, place.control = control, place.report = reinterpret_cast<Report*>(control + 1);
    place.deadline = ptx::globaltimer() + kWaitLimit;
    place.rank = place.layer = place.epoch = place.arrivals = place.events = 0;
    place.index = blockIdx.x, place.size = gridDim.x, place.gave_up = 0;
    make_table();
  }
  sync_block();
  phase<&DraftGemm::start>();
  run();
  ptx::wait_copies<0>();  // nothing may land in the shared memory of the next block
}

}  // namespace

Status draft(Stream stream, const DraftCall& call) {
  const DraftPlan& p = call.plan;
  int device = 0, limit = 0, multiprocessors = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (e != cudaSuccess) return cuda_status("draft", e);
  const int64_t region = std::max<int64_t>(kDraftRegionBytes, p.hidden * 2), bytes = sizeof(DraftShared) + region;
  if (bytes > limit)
    return {"draft: a block needs " + std::to_string(bytes) + " bytes of shared memory, device " +
            std::to_string(device) + " has " + std::to_string(limit) + "; hidden_size " + std::to_string(p.hidden) +
            " is too large"};
  if (const Status status = allow_shared("draft", draft_kernel, bytes); !status.ok()) return status;
  // What a launch that gave up leaves: no token.
  e = cudaMemsetAsync(call.workspace + draft_workspace(p).control, 0, 256, cuda_stream(stream));
  if (e == cudaSuccess && p.width > 0)
    e = cudaMemsetAsync(call.tree_token, 0xFF, p.batch * p.width * sizeof(int32_t), cuda_stream(stream));
  if (e != cudaSuccess) return cuda_status("draft", e);
  return cuda_status("draft", launch_kernel(draft_kernel, std::min<int64_t>(multiprocessors, kMaxDraftBlocks), kThreads,
                                            bytes, stream, call));
}

}  // namespace muse
