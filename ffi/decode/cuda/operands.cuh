// Operands that a dense GEMM makes for itself, every block its own, straight into shared memory: the normed stream, and
// the weighted sum over the experts. Otherwise some blocks would make them for all and the rank would have to meet.
#pragma once

#include "ffi/decode/cuda/dense.cuh"

namespace muse {

// The chosen experts of a pass's rows, in each row by ascending id; behind the operand in the region.
struct ExpertTerms {
  float2 term[kPassRows * kMaxTopK];    // weight and rho
  int32_t place[kPassRows * kMaxTopK];  // of the expert's output
  int32_t expert[kPassRows * kMaxTopK];
};

class OperandSteps : public DenseBase {
 public:
  using DenseBase::DenseBase;

  // h, the gained norm of the stream; false: somebody gave up. The sums of squares that are waited for also say that
  // the stream is there.
  __device__ bool load_normed(int i0) {
    const bool attention = s_.gemm == Gemm::kQkvu;
    const Range segments = segments_of(kSegments);
    const int count = min(kPassRows, rows() - i0), length = hidden() / kSegments;
    if (const int i = thread_index(); i < count) {
      const uint64_t* slot = mine<uint64_t>(w_.row_sums[attention]) + (i0 + i) * kSegments;
      const float sum = wait_sum(place_, Phase::kBranch, slot, 1, me(), kBarrierGrace);
      fence_rank();
      s_.scale[i] = inverse_rms(sum, hidden(), p_.eps);
    }
    if (!all_alive()) return false;
    const int columns = (segments.end - segments.begin) * length;
    const Walk walk(count, columns / 4);
    const float r = s_.scale[walk.source];
    const float* from = stream(i0 + walk.source) + segments.begin * length;
    const uint16_t* gains = gain(attention ? 0 : 1) + segments.begin * length;
    uint32_t* to = operand_words(walk.row);
#pragma unroll 1
    for (int first = walk.first; walk.any(first); first += kAtOnce * walk.step) {
      float4 s[kAtOnce];
      uint2 g[kAtOnce];
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) {
        const int c = 4 * walk.group(first + e * walk.step);
        s[e] = __ldcg(reinterpret_cast<const float4*>(from + c));
        g[e] = __ldcg(reinterpret_cast<const uint2*>(gains + c));
      }
      __syncwarp();  // the compiler would move each load to its use
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) {
        const int group = first + e * walk.step;
        if (group >= walk.groups) break;
        const float4 n = four(g[e]);
        uint32_t* words = to + word_of(4 * group);
        words[0] = pack(to_bf16((s[e].x * r) * n.x), to_bf16((s[e].y * r) * n.y));
        words[4] = pack(to_bf16((s[e].z * r) * n.z), to_bf16((s[e].w * r) * n.w));  // the next lane's
      }
    }
    return true;
  }

  // This rank's columns of the weighted sum over the chosen experts; false: somebody gave up. The outputs of other
  // blocks lie behind their sums of squares.
  __device__ bool load_combined(int i0) {
    const int width = static_cast<int>(p_.moe_columns()), k_count = top_k(), count = min(kPassRows, rows() - i0);
    const int own = thread_index(), pair = i0 * k_count + own;
    static_assert(kPassRows * kMaxTopK <= kThreads, "a thread per pair");
    const bool present = own < count * k_count;
    ExpertTerms& terms = *region<ExpertTerms>(static_cast<int>(row_parallel_operand_bytes(width)));
    if (present) terms.expert[own] = __ldcg(mine<int32_t>(w_.router_experts) + pair);
    sync_block();
    if (present) {
      const float weight = __ldcg(mine<float>(w_.router_weights) + pair);
      const int first = own / k_count * k_count;
      int at = first;
#pragma unroll 1
      for (int k = 0; k < k_count; ++k) at += terms.expert[first + k] < terms.expert[own];
      const uint64_t* slot = slots_from(0, w_.sums, kMaxRows * k_count) + pair;
      const float sum = wait_sum(place_, Phase::kCombine, slot, kMaxRows * k_count, -1);
      fence_rank();
      terms.term[at] = {weight, inverse_rms(sum, moe_hidden(), p_.post_eps)};
      terms.place[at] = pair * width;
    }
    if (!all_alive()) return false;
    const Walk walk(count, width / 8);
    const uint16_t *gains = post_gain(), *f = mine<uint16_t>(w_.f);
    const float2* own_terms = terms.term + walk.source * k_count;
    const int* place = terms.place + walk.source * k_count;
    uint32_t* to = operand_words(walk.row);
#pragma unroll 1
    for (int first = walk.first; walk.any(first); first += walk.step) {
      const int c = 8 * walk.group(first);
      const uint4 g = __ldg(reinterpret_cast<const uint4*>(gains + c));
      const float4 low = four({g.x, g.y}), high = four({g.z, g.w});
      float x[8] = {};
#pragma unroll 1
      for (int k0 = 0; k0 < k_count; k0 += kAtOnce) {
        uint4 y[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k)
          y[k] = __ldcg(reinterpret_cast<const uint4*>(f + place[min(k0 + k, k_count - 1)] + c));
        __syncwarp();
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          if (k0 + k >= k_count) break;
          const float2 term = own_terms[k0 + k];
          const auto add = [&](float& x, float f, float gain) { x = fma1(term.x, (f * gain) * term.y, x); };
          const float4 a = four({y[k].x, y[k].y}), b = four({y[k].z, y[k].w});
          add(x[0], a.x, low.x), add(x[1], a.y, low.y), add(x[2], a.z, low.z), add(x[3], a.w, low.w);
          add(x[4], b.x, high.x), add(x[5], b.y, high.y), add(x[6], b.z, high.z), add(x[7], b.w, high.w);
        }
      }
      if (first >= walk.groups) continue;
#pragma unroll
      for (int t = 0; t < 4; ++t) to[word_of(c) + 4 * t] = pack(to_bf16(x[2 * t]), to_bf16(x[2 * t + 1]));
    }
    return true;
  }

 protected:
  __device__ static float4 four(uint2 two) {
    return {low_bf16(two.x), high_bf16(two.x), low_bf16(two.y), high_bf16(two.y)};
  }

  __device__ const uint16_t* post_gain() const {
    return global(a_.shared.moe_gains) + (2 * layer() + 1) * moe_hidden() + me() * static_cast<int>(p_.moe_columns());
  }

 private:
  static constexpr int kAtOnce = 8;  // loads of a thread in flight

  // What a thread makes of a pass of `count` rows: one row, from group `first` of its columns every step-th. A warp has
  // eight groups of the rows 0, 1, 8 and 9 (2 further on, 4, 6): whole lines of memory, and few conflicts in shared
  // memory. Threads of rows and groups that do not exist load the last that does, so that warps stay together; rows
  // that do not exist have a place.
  struct Walk {
    int groups, row, source, first, step;
    __device__ Walk(int count, int groups) : groups(groups) {
      const int lane = thread_index() % 32, warp = thread_index() / 32, shift = count > 4 ? 2 : count > 2 ? 1 : 0;
      row = (lane >> 3 & 1) + (warp & ((1 << shift) - 1)) * 2 + (lane >> 4) * 8;
      source = min(row, count - 1);
      first = (warp >> shift) * 8 + lane % 8;
      step = (kWarps >> shift) * 8;
    }
    __device__ bool any(int group) const { return (group & ~7) < groups; }  // for a lane of the warp
    __device__ int group(int group) const { return min(group, groups - 1); }
  };

  // Columns c and c + 1 of row i are word word_of(c) of operand_words(i), for even c.
  __device__ uint32_t* operand_words(int i) const { return region<uint32_t>() + column_tile_at(i, 0, 0) / 2; }
  __device__ static int word_of(int c) { return column_tile_at(0, c, 0) / 2; }
};

}  // namespace muse
