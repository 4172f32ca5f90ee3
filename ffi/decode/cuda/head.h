// Launch of the head kernel on one device.
#pragma once

#include "ffi/decode/step.h"
#include "ffi/decode/workspace.h"

namespace muse {

struct HeadArgs {
  int64_t rows, hidden, vocab;
  float eps, multiplier, cap;
  const float* stream;
  const uint16_t* gain;
  const int32_t* sequence;
  const uint16_t* lm_head[kRanks];  // of local ranks
  float* logits[kRanks];
  int32_t* token;
  bool* nan;
  int64_t h, best;  // workspace offsets
  unsigned char* workspace[kRanks];
  Report* report[kRanks];
  int32_t local[kRanks];
  int32_t local_count;
  uint64_t wait_limit_ns;
};

Status prepare_head(int64_t hidden, int* blocks);
Status launch_head(Stream stream, const HeadArgs& args, int blocks);

}  // namespace muse
