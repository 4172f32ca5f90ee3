// Launch of the fused decode kernel on one device.
#pragma once

#include "ffi/decode/step.h"
#include "ffi/decode/workspace.h"

namespace muse {

// The kernel's parameter. Weights and results lie on this device, workspaces anywhere that its stores reach.
struct LayersArgs {
  Plan plan;
  Workspace offsets;
  RankPointers rank[kRanks];  // only the entries of local ranks are filled
  SharedPointers shared;
  StepResults results;
  unsigned char* workspace[kRanks];
  Report* report[kRanks];
  int32_t local[kRanks];  // the ranks of this device
  int32_t local_count;
  int32_t silent_rank;  // for tests: this rank's blocks leave at once; -1 none
  uint64_t wait_limit_ns;
  int32_t* epoch;  // the call's aliased state: {id, calls}
};

// Dynamic shared memory of a block, bytes.
int64_t layers_shared_bytes(const Plan& plan);

// Sets the kernel's attributes and loads it on the current device; `blocks` is the largest grid that is resident at
// once.
Status prepare_layers(const Plan& plan, int* blocks);

Status launch_layers(Stream stream, const LayersArgs& args, int blocks);

}  // namespace muse
