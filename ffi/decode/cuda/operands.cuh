// Operands of dense GEMMs, every block its own, straight into shared memory, for which the rank need not meet: the
// normed stream, which every block norms for itself, and what blocks tell each other through slots.
#pragma once

#include "ffi/decode/cuda/dense.cuh"

namespace muse {

class OperandSteps : public DenseBase {
 public:
  using DenseBase::DenseBase;

  // h, the gained norm of the stream; false: somebody gave up. The sums of squares that are waited for also say that
  // the stream is there.
  __device__ bool load_normed(int i0) {
    const bool attention = s_.gemm <= Gemm::kGates;
    const auto index = static_cast<uint32_t>(s_.gemm);
    const int count = min(kPassRows, rows() - i0), length = hidden() / kSegments;
    if (const int i = thread_index(); i < count) {
      const uint64_t* slot = mine<uint64_t>(w_.row_sums[attention]) + (i0 + i) * kSegments;
      const float sum = wait_sum(place_, Phase::kBranch, slot, 1, me(), kBarrierGrace);
      fence_rank();
      s_.scale[i] = rms_factor(sum, hidden(), p_.eps);
    }
    ptx::wait_all_copies();  // of the router's rows, also where the block leaves
    if (!all_alive()) return false;
    const int first_column = s_.jobs.dense[index].segment(s_.jobs.tasks[index]) * length;
    const Walk walk(count, length / 4);
    const float r = s_.scale[walk.source];
    const float4* from = reinterpret_cast<const float4*>(stream(i0 + walk.source) + first_column);
    const uint2* gains = reinterpret_cast<const uint2*>(gain(attention ? 0 : 1) + first_column);
    uint32_t* words = operand_words(walk.row) + word_of(4 * walk.first);
    const int stride = word_of(4 * walk.step);
    constexpr int kQuads = 8, kPart = kQuads / 2;  // loads of a thread in flight; quads in the code
#pragma unroll 1
    for (int first = walk.first; walk.any(first); first += kQuads * walk.step) {
      float4 s[kQuads];
      uint2 g[kQuads];
#pragma unroll
      for (int e = 0; e < kQuads; ++e) {
        const int group = walk.group(first + e * walk.step);
        s[e] = __ldcg(from + group);
        g[e] = __ldcg(gains + group);
      }
      __syncwarp();  // the compiler would move each load to its use
#pragma unroll 1
      for (int left = walk.groups - first, end = left - kQuads * walk.step; left > max(end, 0);) {
#pragma unroll
        for (int e = 0; e < kPart; ++e, left -= walk.step, words += stride) {
          if (left > 0) {
            const float4 n = four(g[e]);
            words[0] = pack(to_bf16((s[e].x * r) * n.x), to_bf16((s[e].y * r) * n.y));
            words[4] = pack(to_bf16((s[e].z * r) * n.z), to_bf16((s[e].w * r) * n.w));  // the next lane's
          }
          s[e] = s[e + kPart], g[e] = g[e + kPart];  // the halves change places
        }
      }
    }
    return true;
  }

  // Which experts' outputs this block will add up, as far as routing tells, for the pass that starts at row i0.
  __device__ void prepare_terms(int i0) {
    const int words = static_cast<int>(p_.moe_columns()) / 2, k_count = top_k(), j = thread_index();
    const CombineShare own = combine_share(i0);
    ExpertTerms& terms = s_.terms;
    const int pair = (i0 + own.first_row) * k_count + j;
    static_assert(kPassRows * kMaxTopK <= kThreads, "a thread per pair");
    uint32_t chosen[2] = {};
    if (j < own.pairs) {
      wait(
          Phase::kExperts, [&](int e) { return mine<uint64_t>(e ? w_.router_weights : w_.router_experts) + pair; },
          [&](int) { return me(); }, chosen, kBarrierGrace);
      terms.expert[j] = static_cast<int16_t>(chosen[0]);
    }
    sync_block();
    if (j >= own.pairs) return;
    const int first = j - static_cast<uint32_t>(j) % k_count;
    int at = first;
#pragma unroll 1
    for (int k = 0; k < k_count; ++k) at += terms.expert[first + k] < terms.expert[j];
    terms.term[at].x = bit_cast<float>(chosen[1]);
    terms.place[at] = pair * words;
    terms.at[j] = static_cast<int16_t>(at);
  }

  // A block's share of the weighted sum, a thread per word. The outputs come to shared memory while the sums of squares
  // are on their way.
  __device__ bool combine(int i0) {
    const int words = static_cast<int>(p_.moe_columns()) / 2, k_count = top_k(), j = thread_index();
    const CombineShare share = combine_share(i0);
    const Range own = share.words;
    ExpertTerms& terms = s_.terms;
    uint32_t* outputs = region<uint32_t>() + j;  // [slot][thread]
#pragma unroll 1
    for (int begin = own.begin; begin < own.end; begin += kThreads) {
      const int at = begin + j;
      int first = 0, c = at - share.first_row * words;  // the row's first pair, the word
#pragma unroll 1
      for (; c >= words; c -= words) first += k_count;  // at most once where blocks are many
      constexpr int kAtOnce = 8;                        // loads in flight
#pragma unroll 1
      for (int k0 = 0; k0 < k_count && at < own.end; k0 += kAtOnce) {
        const int last = first + k_count - 1;
        uint32_t two[kAtOnce] = {};
        wait(
            Phase::kCombine, [&](int k) { return mine<uint64_t>(w_.f) + (terms.place[min(first + k0 + k, last)] + c); },
            [&](int) { return me(); }, two, kBarrierGrace);
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k)
          if (k0 + k < k_count) outputs[(k0 + k) * kThreads] = two[k];
      }
      if (begin == own.begin) {
        if (const int pair = j ^ kThreads / 2; pair < share.pairs) {  // by other warps than the words
          const uint64_t* slot = slots_from(0, w_.sums, kMaxRows * k_count) + (i0 + share.first_row) * k_count + pair;
          const float sum = wait_sum(place_, Phase::kCombine, slot, kMaxRows * k_count, -1);
          terms.term[terms.at[pair]].y = rms_factor(sum, moe_hidden(), p_.post_eps);
        }
        if (!all_alive()) return false;
      }
      if (at >= own.end) break;
      const uint32_t gain = __ldg(reinterpret_cast<const uint32_t*>(global(a_.shared.moe_gains) + post_gains()) + c);
      float x = 0.0f, y = 0.0f;
      const auto add = [&](int k) {
        const float2 term = terms.term[first + k];
        const uint32_t two = outputs[k * kThreads];
        x = fma1(term.x, (low_bf16(two) * low_bf16(gain)) * term.y, x);
        y = fma1(term.x, (high_bf16(two) * high_bf16(gain)) * term.y, y);
      };
      int k = 0;
#pragma unroll 1
      for (; k + 4 <= k_count; k += 4) {
#pragma unroll
        for (int e = 0; e < 4; ++e) add(k + e);
      }
#pragma unroll 1
      for (; k < k_count; ++k) add(k);
      store_slot(mine<uint64_t>(w_.combined) + i0 * words + at, pack(to_bf16(x), to_bf16(y)), place_.epoch);
    }
    return true;
  }

  // This rank's columns are segment me() of the sum of squares of each pair of a pass: a warp per pair, whose halves
  // fetch columns of 16 in turn, the result to every rank. By the last warps first, because the first ones have words
  // to add up.
  __device__ void push_sums_of_squares(int i0) {
    const int lane = thread_index() % 32, half = lane / kLanes, j = lane % kLanes;
    const int words = static_cast<int>(p_.moe_columns()) / 2, steps = words / (kLanes / 2);
    const int begin = i0 * top_k(), end = begin + min(kPassRows, rows() - i0) * top_k();
    const uint16_t* g = global(a_.shared.moe_gains) + post_gains() + j;
#pragma unroll 1
    for (int pair = begin + (kWarps - 1 - thread_index() / 32) * blocks() + block(); pair < end;
         pair += blocks() * kWarps) {
      const int word = pair * words + j / 2;
      float sum = 0.0f;
      constexpr int kAtOnce = 8;  // loads in flight
#pragma unroll 1
      for (int first = 0; first < steps; first += 2 * kAtOnce) {
        const auto step = [&](int e) { return min(first + 2 * e + half, steps - 1); };
        uint16_t gains[kAtOnce];
        uint32_t two[kAtOnce] = {};
#pragma unroll
        for (int e = 0; e < kAtOnce; ++e) gains[e] = __ldg(g + step(e) * kLanes);
        wait(
            Phase::kCombine, [&](int e) { return mine<uint64_t>(w_.f) + (word + step(e) * (kLanes / 2)); },
            [&](int) { return me(); }, two, kBarrierGrace);
#pragma unroll
        for (int e = 0; e < kAtOnce; ++e) {
          float z = (j % 2 ? high_bf16(two[e]) : low_bf16(two[e])) * from_bf16(gains[e]);
          if (first + 2 * e + half >= steps) z = 0.0f;  // adds nothing
          sum = fma1(z, z, sum);                        // of the lower half, which counts
          const float other = __shfl_xor_sync(~0u, z, kLanes);
          sum = fma1(other, other, sum);
        }
      }
      sum = fold_warp(sum);
      if (lane < kRanks)
        store_slot(slots_to(lane, w_.sums, kMaxRows * top_k()) + pair, bit_cast<uint32_t>(sum), place_.epoch);
    }
  }

  // The operand of a row-parallel GEMM, two columns a slot: attention's rows, or this rank's columns of the weighted
  // sum over the chosen experts. Blocks share it out and tell each other; false: somebody gave up.
  __device__ bool load_slots(int i0) {
    const bool attention = s_.gemm == Gemm::kOutput;
    const int words = static_cast<int>(attention ? p_.q_columns() : p_.moe_columns()) / 2;
    const int count = min(kPassRows, rows() - i0);
    const uint64_t* slots = mine<uint64_t>(attention ? w_.o : w_.combined) + i0 * words;
    if (attention) {
      if (thread_index() == kThreads - 1) wait_arrived(place_, Phase::kAttention);  // before partial sums are stored: H
      // First a word of what a block stores at once: all would be much to look at again and again.
      const int heads = s_.attention.kv_heads;
#pragma unroll 1
      for (int part = thread_index(); part < count * heads; part += kThreads) {
        uint32_t last[1];
        wait(
            Phase::kAttention, [&](int) { return slots + (part + 1) * (words / heads) - 1; }, [&](int) { return me(); },
            last, kBarrierGrace);
      }
    }
    sync_block();  // combine's part of the region is read
    const int pairs = words / 2,
              end = count > kSegments ? 2 * pairs : pairs;  // of words; of the first rows, of the others
    static_assert(kPassRows == 2 * kSegments);
#pragma unroll 1
    for (int at = thread_index(); at < end; at += kThreads) {
      const int row = at < pairs ? 0 : kSegments, c = 2 * (at < pairs ? at : at - pairs);
      wait_pairs(place_, attention ? Phase::kAttention : Phase::kCombine, slots + row * words + c, words, count - row,
                 me(), operand_words(row) + word_of(2 * c), column_tile_at(1, 0, 0) / 2, word_of(2), kBarrierGrace);
    }
    return all_alive();
  }

 protected:
  __device__ static float4 four(uint2 two) {
    return {low_bf16(two.x), high_bf16(two.x), low_bf16(two.y), high_bf16(two.y)};
  }

  // Of all gains of the experts' norms, where those of this rank's columns behind them begin.
  __device__ int post_gains() const {
    return (2 * layer() + 1) * moe_hidden() + me() * static_cast<int>(p_.moe_columns());
  }

 private:
  // This block's share of the words of a pass, and the pairs of its rows.
  struct CombineShare {
    Range words;
    int first_row, pairs;
  };
  __device__ CombineShare combine_share(int i0) const {
    const int words = static_cast<int>(p_.moe_columns()) / 2, count = min(kPassRows, rows() - i0);
    // Part place_.index of place_.size, by one division.
    const Divisor by_blocks = divisor(blocks());
    const int first_row = by_blocks.quotient(count * block()), begin = by_blocks.quotient(count * words * block()),
              end = by_blocks.quotient(count * words * (block() + 1));
    int pairs = 0;
#pragma unroll 1
    for (int row = first_row; begin < end && row * words < end; ++row) pairs += top_k();
    return {{begin, end}, first_row, pairs};
  }

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
