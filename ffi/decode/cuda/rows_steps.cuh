// Rows: embedding, the residual stream, and the owners' part of a row-parallel GEMM. Threads work on four neighbouring
// columns.
#pragma once

#include "ffi/decode/cuda/dense_steps.cuh"

namespace muse {

class RowSteps : public DenseSteps {
 public:
  using DenseSteps::DenseSteps;

  // The stream at the start and its sums of squares: the embedding of the rows' tokens, or what an earlier range of
  // layers left. Results of inactive rows are zeros.
  __device__ bool start() {
    clear_inactive();
    next_epoch();  // the launch before may have ended with the old number in the slots of sums
    const bool first = p_.layer_begin == 0;
    if (first) embed();
    const int half = hidden() / kRanks / 2, own = static_cast<int>(p_.vocab_rank());
    float2* x = region<float2>();
#pragma unroll 1
    for (int unit = block(); unit < rows() * kSegments; unit += blocks()) {
      const int i = unit / kSegments, segment = unit % kSegments;
      const int64_t row = s_.rows.row[i];
#pragma unroll 1
      for (int c = thread_index(); c < half; c += kThreads) {
        const int at = segment * half + c;
        if (first) {
          const uint64_t* slot = slots_from(segment, w_.branch[0], kMaxRows * half) + i * half + c;
          uint32_t word[1] = {};
          wait(
              Phase::kEmbed, [&](int) { return slot; }, [&](int) { return s_.rows.token[i] / own; }, word,
              kBarrierGrace);
          x[c] = {canonical(low_bf16(word[0])), canonical(high_bf16(word[0]))};
        } else {
          x[c] = reinterpret_cast<const float2*>(a_.shared.stream + row * hidden())[at];
        }
        reinterpret_cast<float2*>(stream(i))[at] = x[c];
      }
      if (!all_alive()) return false;
      store_row_sum(1, unit);
    }
    return true;
  }

  // As owner of one segment of the output columns: adds the eight ranks' partial sums in the contract's order and gives
  // everybody the rounded results, and the segment's sum of squares for the norm that follows. A block per row.
  __device__ bool reduce() {
    const int which = exchange();
    const int owned = hidden() / kRanks, per_source = kMaxRows * owned;
    const Phase phase = which ? Phase::kCombine : Phase::kOutput;
    float4* z = region<float4>();
    const uint16_t* scale = gain(2) + me() * owned;
#pragma unroll 1
    for (int i = block(); i < rows(); i += blocks()) {
#pragma unroll 1
      for (int q = thread_index(); q < owned / 4; q += kThreads) {
        uint2 y;
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
          const uint64_t* first = slots_from(0, w_.partial[which], per_source) + i * owned + 4 * q + 2 * half;
          uint32_t word[2 * kRanks] = {};
          wait(phase, [&](int e) { return first + e / 2 * per_source + e % 2; }, [](int e) { return e / 2; }, word);
          if (place_.gave_up) break;
          float s[2][kRanks];
#pragma unroll
          for (int e = 0; e < 2 * kRanks; ++e) s[e % 2][e / 2] = bit_cast<float>(word[e]);
          const uint32_t two = pack(to_bf16(tree8(s[0])), to_bf16(tree8(s[1])));
          push_all(w_.branch[which], kMaxRows * (owned / 2), i * (owned / 2) + 2 * q + half, two);
          (half ? y.y : y.x) = two;
        }
        z[q] = branch_value(four(y), scale, q, which);
      }
      if (!all_alive()) return false;
      const float sum = segment_sumsq(owned, reinterpret_cast<const float*>(z), s_.partial);
      if (thread_index() < kRanks)
        store_slot(slots_to(thread_index(), w_.branch_sums[which], kMaxRows) + i, bit_cast<uint32_t>(sum),
                   place_.epoch);
    }
    return true;
  }

  // Adds the branch that the row-parallel exchange `which` brought to the stream. A unit is a segment of a row; the
  // GEMM that follows norms the row by its segments' sums of squares.
  __device__ bool branch() {
    const int l = layer(), which = exchange();
    const int owned = hidden() / kRanks, units = rows() * kSegments;
    const float* alpha = global(a_.shared.gates) + (4 * l + 2 * which) * hidden();
    const bool last = which == 1 && l + 1 == p_.layer_end, tap_rank = me() == a_.local[0];
    float4* x = region<float4>();
#pragma unroll 1
    for (int unit = block(); unit < units; unit += blocks()) {
      const int i = unit / kSegments, segment = unit % kSegments;
      const int64_t row = s_.rows.row[i];
      const int64_t tap = (int64_t{2 * static_cast<int>(l - p_.layer_begin) + which} * p_.rows + row) * hidden();
#pragma unroll 1
      for (int q = thread_index(); q < owned / 4; q += kThreads) {
        const int column = segment * owned + 4 * q;
        // Fetched while we wait; kept in shared memory, because registers are few.
        float4 *s = x + q, *a = s + owned / 4, *b = a + owned / 4;
        *s = __ldcg(reinterpret_cast<const float4*>(stream(i) + column));
        *a = __ldg(reinterpret_cast<const float4*>(alpha + column));
        *b = __ldg(reinterpret_cast<const float4*>(alpha + hidden() + column));
        const uint64_t* sums = slots_from(0, w_.branch_sums[which], kMaxRows) + i;
        const uint64_t* words = slots_from(segment, w_.branch[which], kMaxRows * (owned / 2)) + i * (owned / 2) + 2 * q;
        uint32_t word[kRanks + 2] = {};
        wait(
            Phase::kBranch, [&](int e) { return e < kRanks ? sums + e * kMaxRows : words + e - kRanks; },
            [&](int e) { return e < kRanks ? e : segment; }, word, kBranchGrace);
        if (place_.gave_up) break;  // nothing of this is to be seen
        float ss[kRanks];
#pragma unroll
        for (int r = 0; r < kRanks; ++r) ss[r] = bit_cast<float>(word[r]);
        const float r = rms_factor(tree8(ss), hidden(), p_.post_eps);
        const float4 y = branch_value(four({word[kRanks], word[kRanks + 1]}), gain(2) + segment * owned, q, which);
        const auto add = [r](float stream, float alpha, float beta, float y) {
          return canonical(alpha * stream + beta * round_bf16(y * r));
        };
        const float4 sum = {add(s->x, a->x, b->x, y.x), add(s->y, a->y, b->y, y.y), add(s->z, a->z, b->z, y.z),
                            add(s->w, a->w, b->w, y.w)};
        *reinterpret_cast<float4*>(stream(i) + column) = sum;
        *s = sum;
        if (tap_rank && last) *reinterpret_cast<float4*>(a_.results.stream + row * hidden() + column) = sum;
        if (tap_rank && a_.results.tap_residuals)
          *reinterpret_cast<float4*>(a_.results.tap_residuals + tap + column) = sum;
      }
      if (!all_alive()) return false;
      if (!last) store_row_sum(which, unit);
    }
    return true;
  }

 private:
  // A unit of the stream is stored and stands in the region: its sum of squares tells the rank's blocks so.
  __device__ void store_row_sum(int which, int unit) {
    const bool storing = thread_index() == kThreads - 1;
    if (storing) fence_rank();  // while the first warp adds
    const float sum = segment_sumsq(hidden() / kSegments, region<float>(), s_.partial);
    if (storing) store_slot(mine<uint64_t>(w_.row_sums[which]) + unit, bit_cast<uint32_t>(sum), place_.epoch);
  }

  __device__ static float4 gains_of(const uint16_t* g, int quad) {
    return four(__ldg(reinterpret_cast<const uint2*>(g) + quad));
  }

  // What the norm of a branch sees of four columns: the branch itself, or, scale first, times its gain.
  __device__ static float4 branch_value(float4 y, const uint16_t* scale, int quad, int which) {
    if (which == 0) return y;
    const float4 g = gains_of(scale, quad);
    return {round_bf16(y.x * g.x), round_bf16(y.y * g.y), round_bf16(y.z * g.z), round_bf16(y.w * g.w)};
  }

  // The owner of a token's embedding row norms it and gives it to everybody through the branch slots.
  __device__ void embed() {
    const int half = hidden() / kRanks / 2, per_source = kMaxRows * half, own = static_cast<int>(p_.vocab_rank());
    float* x = region<float>();
#pragma unroll 1
    for (int i = block(); i < rows(); i += blocks()) {
      const int token = s_.rows.token[i];
      if (token / own != me()) continue;
      const uint16_t* row = weights().embed + int64_t{token % own} * hidden();
      sync_block();
#pragma unroll 1
      for (int c = thread_index(); c < hidden(); c += kThreads) x[c] = from_bf16(row[c]);
      sync_block();
      const float r = rms_factor(block_sumsq(hidden(), x, s_.partial), hidden(), p_.eps);
#pragma unroll 1
      for (int c = thread_index(); c < hidden() / 2; c += kThreads) {
        const uint32_t word = pack(to_bf16(x[2 * c] * r), to_bf16(x[2 * c + 1] * r));
        // Here the source is the part of the row, not the rank.
        const int64_t at = w_.branch[0] + int64_t{c / half * per_source + i * half + c % half} * 8;
#pragma unroll 1
        for (int to = a_.loopback ? me() : 0; to < (a_.loopback ? me() + 1 : kRanks); ++to)
          store_slot(reinterpret_cast<uint64_t*>(a_.workspace[to] + at), word, place_.epoch);
      }
    }
    sync_block();  // x is read
  }

  __device__ void clear_inactive() {
    if (me() != a_.local[0]) return;
    const int64_t layers = p_.layer_end - p_.layer_begin;
    const auto clear = [&](auto* data, int64_t count) {
#pragma unroll 1
      for (int64_t c = thread_index(); c < count; c += kThreads) data[c] = 0;
    };
#pragma unroll 1
    for (int t = block(); t < p_.rows; t += blocks()) {
      if (a_.shared.sequence[t] != -1) continue;
      clear(a_.results.stream + int64_t{t} * hidden(), hidden());
      if (!a_.results.tap_residuals) continue;
#pragma unroll 1
      for (int l = 0; l < layers; ++l) {
        for (int which = 0; which < 2; ++which)
          clear(a_.results.tap_residuals + ((2 * l + which) * p_.rows + t) * hidden(), hidden());
        clear(a_.results.tap_experts + (l * p_.rows + t) * top_k(), top_k());
        clear(a_.results.tap_weights + (l * p_.rows + t) * top_k(), top_k());
      }
    }
  }
};

}  // namespace muse
