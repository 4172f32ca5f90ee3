// A whole draft on a GPU in one launch: one block per multiprocessor, all resident at once. What phases tell each other
// are words that are their own flags (workspace.h), but for a few that meet at barriers. The arithmetic is
// ffi/draft/cpu/draft.cc's, bit for bit.
#include <algorithm>

#include "ffi/draft/cuda/attention.cuh"
#include "ffi/draft/cuda/choose.cuh"
#include "ffi/draft/cuda/gemm.cuh"
#include "ffi/draft/cuda/rows.cuh"
#include "ffi/ops/launch.cuh"

namespace muse {
namespace {

constexpr uint64_t kWaitLimit = 10'000'000'000;  // ns

// The table of GEMMs in the order in which they run. Threads make it together, one for each layer and one for the rest.
class Table {
 public:
  __device__ explicit Table(DraftShared& shared) : c_(shared.call), s_(shared) {}

  // The projections of the features, and the head.
  __device__ void ends() {
    const DraftPlan& p = c_.plan;
    const int h = static_cast<int>(p.hidden), kv = static_cast<int>(p.kv_columns()), rank = static_cast<int>(p.rank);
    const int fed = static_cast<int>(p.batch * p.fed), layers = static_cast<int>(p.layers);
    const DraftWorkspace& w = s_.offsets;
    add(c_.fc, w.fused, 0, h, h), job(static_cast<int>(p.taps) * h, fed, w.features);
    for (int l = 0; l < layers; ++l) {
      add(c_.layer[l].k, w.keys_values, 2 * l * kv, kv, 2 * layers * kv);
      add(c_.layer[l].v, w.keys_values, (2 * l + 1) * kv, kv, 2 * layers * kv);
    }
    job(h, fed, w.context);
    s_.job = 0, s_.slot = 0, s_.jobs = jobs_;
    if (p.width == 0) return;
    skip(layers);
    s_.matrix[matrices_++] = {c_.head, c_.workspace + w.logits, static_cast<int>(p.vocab), static_cast<int>(p.vocab)};
    if (p.is_v2()) add(c_.selector, w.gate, 0, rank, rank);
    job(h, static_cast<int>(p.batch * p.places()), w.normed.of(2 * layers), DraftOutput::kHead);
    s_.jobs = jobs_;
  }

  __device__ void layer(int l) {
    const DraftPlan& p = c_.plan;
    const DraftWorkspace& w = s_.offsets;
    const DraftLayer& layer = c_.layer[l];
    const int h = static_cast<int>(p.hidden), q = static_cast<int>(p.q_columns()),
              kv = static_cast<int>(p.kv_columns());
    const int inner = static_cast<int>(p.inner), rows = static_cast<int>(p.rows()), all = q + 2 * kv, mlp = 2 * l + 1;
    const int64_t projected = w.projected.of(l), gated = w.gated.of(l);
    matrices_ = first_ = 1 + 2 * static_cast<int>(p.layers), jobs_ = 2;
    skip(l);
    const int64_t attention_input = convolved(layer.attention, 2 * l);
    add(layer.q, projected, 0, q, all), add(layer.k, projected, q, kv, all);
    add(layer.v, projected, q + kv, kv, all), job(h, rows, attention_input);
    add(layer.o, w.branch.of(2 * l), 0, h, h), job(q, rows, w.attended.of(l));
    const int64_t mlp_input = convolved(layer.mlp, mlp);
    add(layer.gate, gated, 0, inner, 0), add(layer.up, gated, 0, inner, 0);
    job(h, rows, mlp_input, DraftOutput::kSwiglu);
    add(layer.down, w.branch.of(mlp), 0, h, h), job(inner, rows, gated);
  }

 private:
  // So many layers' entries.
  __device__ void skip(int layers) {
    const int convolutions = c_.plan.group ? 2 : 0;
    jobs_ += layers * (4 + convolutions), first_ = matrices_ += layers * (7 + convolutions);
  }
  __device__ void add(const uint16_t* weights, int64_t offset, int column, int rows, int stride) {
    s_.matrix[matrices_++] = {weights, reinterpret_cast<uint16_t*>(c_.workspace + offset) + column, rows, stride};
  }
  // The GEMM of sublayer n's coefficients, where it has some; the operand of the GEMM behind it.
  __device__ int64_t convolved(const DraftConvolution& convolution, int64_t n) {
    const DraftPlan& p = c_.plan;
    const int columns = static_cast<int>(p.conv_rows());
    if (!columns) return s_.offsets.normed.of(n);
    add(convolution.projection, s_.offsets.coefficients.of(n), 0, columns, columns);
    job(static_cast<int>(p.hidden), static_cast<int>(p.rows()), s_.offsets.normed.of(n));
    return s_.offsets.convolved.of(n);
  }
  // A GEMM of the matrices that were added since the last.
  __device__ void job(int inner, int tokens, int64_t operand, DraftOutput output = DraftOutput::kBf16) {
    int groups = 0;
    for (int m = first_; m < matrices_; ++m) groups += (s_.matrix[m].rows + 15) / 16;
    s_.table[jobs_++] = {operand, first_, groups, inner, tokens, output};
    first_ = matrices_;
  }

  const DraftCall& c_;
  DraftShared& s_;
  int matrices_ = 0, first_ = 0, jobs_ = 0;
};

__device__ __noinline__ void make_table() {
  const DraftPlan& p = draft_shared().call.plan;
  Table table(draft_shared());
  if (threadIdx.x == 32) table.ends();
  if (threadIdx.x < p.layers && p.width > 0) table.layer(static_cast<int>(threadIdx.x));
}

// Runs a phase as a function of its own, so that registers are shared out phase by phase. Which layer and which GEMM it
// is stands in shared memory: what callers keep would be spilled. The block's next phase may write the region.
template <auto kPhase, typename Steps, typename... Args>
__device__ __noinline__ void phase_of(void (Steps::*)(Args...), Args... args) {
  (Steps(draft_shared()).*kPhase)(args...);
  sync_block();
}
template <auto kPhase, typename... Args>
__device__ __forceinline__ void phase(Args... args) {
  phase_of<kPhase>(kPhase, args...);
}

// All blocks meet: for what they wrote without flags. A barrier's release waits for all weights that its multiprocessor
// has under way, which takes as long as a full ring does. False: somebody gave up, leave the kernel.
__device__ __forceinline__ bool meet() {
  DraftShared& s = draft_shared();
  const bool all = rank_barrier(s.place, Phase::kHead);
  if (threadIdx.x == 0) s.going_on = all;  // who comes to wait next may give up while others still look
  sync_block();
  return s.going_on;
}

// A sublayer's first GEMM, behind its convolution.
__device__ __forceinline__ void project(bool mlp) {
  if (draft_shared().call.plan.group) {
    phase<&DraftGemm::run>();
    phase<&DraftRows::convolve_input>(mlp);
  }
  if (!mlp) phase<&DraftAttention::prefetch>();
  phase<&DraftGemm::run>();
}

__device__ __forceinline__ bool layer() {
  project(false);
  phase<&DraftRows::finish_heads>();
  phase<&DraftAttention::chunks>();
  if (!meet()) return false;
  phase<&DraftAttention::combine>();
  phase<&DraftGemm::run>();
  phase<&DraftRows::norm_rows>(After::kAttention);
  project(true);
  phase<&DraftGemm::run>();
  phase<&DraftRows::norm_rows>(After::kMlp);
  return true;
}

__device__ __noinline__ void run() {
  DraftShared& s = draft_shared();
  phase<&DraftRows::begin>();
  phase<&DraftGemm::run>();
  phase<&DraftRows::norm_rows>(After::kFeatures);
  phase<&DraftGemm::run>();
  phase<&DraftRows::inject>();
  if (s.call.plan.width == 0) return;
  phase<&DraftRows::norm_rows>(After::kNothing);
  if (!meet()) return;  // the rings
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
    s.offsets = draft_workspace(s.call.plan);
    auto* control = reinterpret_cast<Control*>(call.workspace + s.offsets.control);
    for (int r = 0; r < kRanks; ++r) s.workspaces[r] = reinterpret_cast<unsigned char*>(control);
    Place& place = s.place;
    place.workspace = s.workspaces, place.control = control, place.report = reinterpret_cast<Report*>(control + 1);
    place.deadline = ptx::globaltimer() + kWaitLimit;
    place.rank = place.layer = place.epoch = place.arrivals = place.events = 0;
    place.index = blockIdx.x, place.size = gridDim.x, place.gave_up = 0;
  }
  sync_block();
  make_table();
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
  if (multiprocessors < kSegments)  // rows.cuh
    return {"draft: device " + std::to_string(device) + " has " + std::to_string(multiprocessors) +
            " multiprocessors, at least " + std::to_string(kSegments) + " are needed"};
  const int64_t region = std::max<int64_t>(kDraftRegionBytes, p.hidden / kSegments * 2),
                bytes = sizeof(DraftShared) + region;
  if (bytes > limit)
    return {"draft: a block needs " + std::to_string(bytes) + " bytes of shared memory, device " +
            std::to_string(device) + " has " + std::to_string(limit) + "; hidden_size " + std::to_string(p.hidden) +
            " is too large"};
  if (const Status status = allow_shared("draft", draft_kernel, bytes); !status.ok()) return status;
  // What a launch that gave up leaves: no token.
  const DraftWorkspace w = draft_workspace(p);
  e = cudaMemsetAsync(call.workspace + w.control, 0, 256, cuda_stream(stream));
  if (e == cudaSuccess) e = cudaMemsetAsync(call.workspace + w.words, 0xFF, w.word_bytes, cuda_stream(stream));
  if (e == cudaSuccess && p.width > 0)
    e = cudaMemsetAsync(call.tree_token, 0xFF, p.batch * p.width * sizeof(int32_t), cuda_stream(stream));
  if (e != cudaSuccess) return cuda_status("draft", e);
  return cuda_status("draft", launch_kernel(draft_kernel, std::min<int64_t>(multiprocessors, kMaxDraftBlocks), kThreads,
                                            bytes, stream, call));
}

}  // namespace muse
