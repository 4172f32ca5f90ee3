// What becomes of the experts' sums: hidden rows for all ranks, and outputs. By warps of their own, while the chains go
// on.
#pragma once

#include "ffi/decode/cuda/expert_chain.cuh"
#include "ffi/decode/cuda/head_steps.cuh"
#include "ffi/decode/cuda/router_steps.cuh"

namespace muse {

constexpr int kSliceRows = 8;  // (row, slot) pairs of one pass through an expert's weights

class ExpertFinish : public RouterSteps {
 public:
  using RouterSteps::RouterSteps;

  // The finishing warps: help with the dense GEMMs that have tasks for them, finish the block's units, in the order of
  // Step's phases.
  __device__ void finish_all() {
    uint32_t first = 0, pass = 0;
#pragma unroll 1
    for (int layers = static_cast<int>(p_.layer_end - p_.layer_begin), l = 0; l < layers; ++l)
#pragma unroll 1
      for (int stage = 0; stage < kStages; ++stage) {
        const bool second = stage == kExpertStage + 1;
        if (!(stage == kExpertStage || second
                  ? finish_units(second, first)
                  : help<&ExpertFinish::warp_tasks>(s_, s_.jobs.tasks[min(stage, kDenseGemms - 1)], pass)))
          return;
      }
    if (a_.head.token) help<&HeadSteps::multiply>(s_, s_.jobs.tasks[kHeadJob], pass);
  }

 protected:
  __device__ const ExpertJob& this_job() const { return s_.jobs.experts[p_.kind[layer()].nvfp4][s_.second]; }

  __device__ Range own_units() const { return s_.expert_units[s_.second]; }

  __device__ ExpertKind expert_kind() const {
    const int l = layer();
    return !p_.kind[l].nvfp4 ? ExpertKind::kBf16 : p_.quantize_activations ? ExpertKind::kW4A4 : ExpertKind::kW4A16;
  }

  // Segment sums of the units under way: [place][segment][row group of the unit][row][column], in the region. Columns
  // change places in pairs, so that sixteen rows of two neighbouring columns, which a warp reads at once, and eight
  // rows of all, which it writes, lie in different banks.
  __device__ static int sum_at(int row, int column) { return row * kSliceRows + (column ^ (row / 4 % 4 * 2)); }
  __device__ float* unit_sums(uint32_t unit, int segment, int half) const {
    return region<float>() + ((unit % kUnits * kSegments + segment) * 2 + half) * 16 * kSliceRows;
  }

  // Slot words of so many pairs' hidden rows, of one source.
  __device__ int hidden_words(int pairs) const {
    return pairs * (static_cast<int>(p_.inner_columns()) / 16) * static_cast<int>(kPieceWords);
  }

 private:
  // An expert GEMM's units, each by all finishing warps; false: the block is leaving. `first`: the number of the first
  // in the queue.
  __device__ bool finish_units(bool second, uint32_t& first) {
    if (!units_.wait_begin(second, ring_)) return false;
    if (second) {  // before the first output: R
      if (thread_index() % 32 == 0) wait_arrived(place_, Phase::kExperts);
      __syncwarp();
    }
    const Range units = own_units();
#pragma unroll 1
    for (int unit = units.begin; unit < units.end; ++unit, ++first)
      if (!run_phase<&ExpertFinish::finish_unit>(unit, first)) return false;
    units_.end();
    return true;
  }

  // Half a warp per pair, lane j adds the segments of output column j; the warps take two pairs in turn, from another
  // one on in each unit. `number`: in the queue.
  __device__ bool finish_unit(int unit, uint32_t number) {
    const ExpertJob& job = this_job();
    const ExpertKind kind = expert_kind();
    const bool second = s_.second;
    const int lane = thread_index() % 32, j = lane % 16;
    const float unit_of_sum = kind == ExpertKind::kW4A4 ? kCodeScale : 1.0f;
    const int slice = job.by_groups.quotient(unit), group = unit - slice * job.groups, expert = s_.expert[slice];
    const int begin = s_.first[slice], count = s_.first[slice + 1] - begin;
    const float factor[2] = {scale(expert, second ? 2 : 0, kind), scale(expert, second ? 2 : 1, kind)};
    if (!units_.wait_unit(number, ring_)) return false;
#pragma unroll 1
    for (int at = (thread_index() / 32 + number) % kFinishers * 2; at < count; at += 2 * kFinishers) {
      const int column = min(at + lane / 16, count - 1), pair = s_.pairs[begin + column];
      const bool present = at + lane / 16 < count;
      float total[2] = {};
#pragma unroll 1
      for (int half = 0; half < job.unit_groups; ++half) {
        float s[kSegments];
#pragma unroll
        for (int r = 0; r < kSegments; ++r) s[r] = unit_sums(number, r, half)[sum_at(j, column)];
        // A power of two, which changes no rounding: once, behind the sum.
        (half ? total[1] : total[0]) = (tree8(s) * unit_of_sum) * (half ? factor[1] : factor[0]);
      }
      if (second)
        store_outputs(pair, group * job.unit_groups, job.unit_groups, to_bf16(total[0]), to_bf16(total[1]), present);
      else
        push_hidden(kind, pair, group, to_bf16(silu(total[0]) * total[1]), present);
    }
    units_.done(number);
    return true;
  }

  // The fp32 factor of an expert GEMM's result: gate, up or down.
  __device__ float scale(int expert, int which, ExpertKind kind) const {
    if (kind == ExpertKind::kBf16) return 1.0f;
    const int l = layer();
    const float weight = __ldg(a_.shared.scale_2 + (l * static_cast<int>(p_.experts) + expert) * 3 + which);
    return kind == ExpertKind::kW4A4 ? weight * __ldg(a_.shared.input_scales + 2 * l + (which == 2)) : weight;
  }

  // Sixteen lanes hold a 16-block of a pair's hidden row; all lanes of the warp come here, those of a pair that does
  // not exist store nothing. Every rank gets it: as codes and their scale, or as it is.
  __device__ __forceinline__ void push_hidden(ExpertKind kind, int pair, int group, uint16_t m, bool present) {
    const int j = thread_index() % 16, t = j % 8 / 2;
    if (kind != ExpertKind::kW4A4) {
      const uint32_t word = pack(m, static_cast<uint16_t>(__shfl_down_sync(~0u, static_cast<uint32_t>(m), 1)));
      if (present && j % 2 == 0)
        push_all(w_.hidden, hidden_words(kMaxRows * top_k()), hidden_words(pair) + group * kPieceWords + 2 * t + j / 8,
                 word);
      return;
    }
    const Quantized q = quantize_lane(m, __ldg(a_.shared.input_scales + 2 * layer() + 1));
    uint32_t word = code_bits(q.code, j);
    word |= __shfl_xor_sync(~0u, word, 1);
    word |= __shfl_xor_sync(~0u, word, 8);
    word |= scale_bits(q.scale);
    if (!present) return;
    const int at = hidden_words(pair) + group / 2 * kPieceWords + 2 * t + group % 2;
#pragma unroll
    for (int r = j / 8 * 2 + j % 2; r < kRanks; r += 4)  // four lanes have the word, each stores for two ranks
      store_slot(slots_to(r, w_.hidden, hidden_words(kMaxRows * top_k())) + at, word, place_.epoch);
  }

  // Sixteen lanes hold a pair's outputs in one or two row groups from `first` on, a column each. Neighbours make words
  // of two columns: even lanes the first group's, odd lanes the second's.
  __device__ __forceinline__ void store_outputs(int pair, int first, int groups, uint16_t low, uint16_t high,
                                                bool present) {
    const int j = thread_index() % 16, odd = j % 2;
    const auto other = static_cast<uint16_t>(__shfl_xor_sync(~0u, static_cast<uint32_t>(odd ? low : high), 1));
    if (!present || odd >= groups) return;
    uint64_t* slot = mine<uint64_t>(w_.f) + pair * static_cast<int>(p_.moe_columns() / 2) + (first + odd) * 8 + j / 2;
    store_slot(slot, odd ? pack(other, high) : pack(low, other), place_.epoch);
  }
};

}  // namespace muse
