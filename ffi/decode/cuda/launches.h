// Launch of the fused decode kernels, layers and head, on one device.
#pragma once

#include "ffi/decode/cuda/budget.h"
#include "ffi/decode/step.h"
#include "ffi/decode/workspace.h"

namespace muse {

// What the head alone reads and writes; StepArgs::shared.stream is its input.
struct HeadPointers {
  float multiplier, cap;
  const uint16_t* gain;             // [H]
  const uint16_t* lm_head[kRanks];  // of local ranks
  float* logits[kRanks];            // each [rows, V/8]
  int32_t* token;
  bool* nan;
};

// The parameter of both kernels; each reads its part. Weights and results lie on this device, workspaces anywhere that
// its stores reach.
struct StepArgs {
  Plan plan;
  Workspace offsets;
  uint32_t region_bytes;      // of a block's shared memory
  RankPointers rank[kRanks];  // only the entries of local ranks are filled
  SharedPointers shared;
  StepResults results;
  HeadPointers head;
  unsigned char* workspace[kRanks];
  Report* report[kRanks];
  int32_t local[kRanks];  // the ranks of this device
  int32_t local_count;
  int32_t silent_rank;  // for tests: this rank's blocks leave at once; -1 none
  bool loopback;        // for benchmarks: one rank plays all its peers (every workspace is its own)
  uint64_t wait_limit_ns;
  int32_t* epoch;  // the call's aliased state: {id, calls}
};

// Blocks that a rank needs, so that each K segment of a column-parallel GEMM has one (schedule.h).
constexpr int kMinBlocks = kSegments;

// What a communicator keeps of a kernel that it prepared on a device.
struct Prepared {
  int blocks = 0;             // the largest grid that is resident at once
  uint32_t region_bytes = 0;  // of shared memory that the phases use in turn
};

// Check that the model fits the kernel, set its attributes and load it on the current device.
Status prepare_layers(const Plan& plan, Prepared* prepared);
Status prepare_head(const Plan& plan, Prepared* prepared);

Status launch_layers(Stream stream, const StepArgs& args, int blocks);
Status launch_head(Stream stream, const StepArgs& args, int blocks);

}  // namespace muse
