// The head alone: of rows that went through the layers in a launch before, or of some of them.
#include <algorithm>

#include "ffi/decode/cuda/head_steps.cuh"
#include "ffi/decode/cuda/launch.h"
#include "ffi/decode/cuda/place.cuh"
#include "ffi/decode/cuda/producer.cuh"

namespace muse {
namespace {

__global__ void __launch_bounds__(kLaunchThreads, 1) decode_head(const __grid_constant__ StepArgs args) {
  BlockShared& shared = block_shared();
  start_block(args, shared);
  if (threadIdx.x == 0) {
    plan_head(args, shared);
    shared.rows.count = 0;
    for (int t = 0; t < args.plan.rows; ++t)
      if (args.shared.sequence[t] >= 0) shared.rows.row[shared.rows.count++] = static_cast<int16_t>(t);
  }
  __syncthreads();
  const Place& place = shared.place;
  if (!place.gave_up) {
    if (threadIdx.x < kThreads) {
      if (HeadSteps(shared).run() && place.index == 0 && threadIdx.x == 0) finish_launch(place);
    } else if (threadIdx.x / 32 >= kFirstFinisher && shared.rows.count > 0) {
      uint32_t pass = 0;
      help<&HeadSteps::multiply>(shared, shared.jobs.tasks[kHeadJob], pass);
    }
  }
  if (threadIdx.x / 32 == kProducer) {
    if (!place.gave_up && shared.rows.count > 0) {
      Producer producer(shared);
      producer.stream(Producer::dense(shared.jobs.dense[kHeadJob], shared.jobs.tasks[kHeadJob], 0,
                                      (shared.rows.count + kPassRows - 1) / kPassRows));
    }
    Ring(shared.ring).drain(threadIdx.x % 32);
  }
  __syncthreads();  // the producer's copies have landed
}

}  // namespace

Status prepare_head(const Plan& plan, Prepared* prepared) {
  if (kSegments * plan.head_groups() * plan.head_groups() > UINT32_MAX)
    return {"decode_head: a vocabulary of " + std::to_string(plan.vocab) + ", fewer than 2.9 million expected"};
  return prepare_kernel("decode_head", decode_head, sizeof(BlockShared),
                        std::max<int64_t>(dense_operand_bytes(plan.hidden), plan.hidden * 4), prepared);
}

Status launch_head(Stream stream, const StepArgs& args, int blocks) {
  const cudaStream_t queue = cuda_stream(stream);
  cudaError_t e = clear_head(args, queue);
  if (e == cudaSuccess) e = launch_fused(decode_head, args, blocks, sizeof(BlockShared), stream);
  return cuda_status("decode_head", e);
}

}  // namespace muse
