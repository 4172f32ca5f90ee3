// Operands, results and attributes of the layers call, checked and turned into pointers: shared by the CPU handler
// (whose ranks are an operand it can read) and the CUDA handler (whose ranks the communicator knows).
#pragma once

#include "ffi/bindings/handler.h"
#include "ffi/decode/step.h"

namespace muse::bindings {

// One device's view of a step.
struct LayersOperands {
  StepCall call;               // without rank pointers; results holds this device's
  RankPointers local[kRanks];  // of the ranks that this device holds, in order
  int64_t count;               // how many
  const int32_t* ranks;        // [count, 2], in the device's memory: the rank, and a number of the weights' packing
  int32_t* epoch;              // aliased
  // Of a call that goes on to the head, otherwise null; lm_head and logits of this device's ranks, one after the other.
  struct {
    float multiplier, cap;
    const uint16_t *gain, *lm_head;
    int64_t lm_head_elements;  // of a rank
    float* logits;             // [rows, V/8] of each rank
    int32_t* token;
    bool* nan;
  } head;
};

// False when something is wrong; then `check` says what.
bool read_layers(ffi::Span<const int64_t> dims, ffi::Span<const float> scalars, ffi::Span<const int32_t> layer_kinds,
                 const ffi::RemainingArgs& args, const ffi::RemainingRets& rets, bool taps, bool head, Check* check,
                 LayersOperands* out);

// A device's vocabulary weights and logits, its ranks' one after the other, as a call (HeadCall, HeadPointers) has
// them: by rank.
template <typename Call>
void share_head(const std::vector<int32_t>& ranks, const uint16_t* lm_head, int64_t lm_head_elements, float* logits,
                int64_t rank_logits, Call* call) {
  for (size_t i = 0; i < ranks.size(); ++i) {
    call->lm_head[ranks[i]] = lm_head + i * lm_head_elements;
    call->logits[ranks[i]] = logits + i * rank_logits;
  }
}

struct HeadShape {
  int64_t rows, hidden;
  int64_t count;             // ranks of this device
  int64_t columns;           // vocabulary entries of a rank
  int64_t lm_head_elements;  // of a rank's share
};

bool read_head(const S32& ranks, const F32& stream, const Bf16& gain, const Bf16& lm_head, const S32& sequence,
               const S32& epoch, const F32& logits, const S32& token, const ffi::Buffer<ffi::PRED>& nan, int64_t vocab,
               Check* check, HeadShape* out);

}  // namespace muse::bindings
