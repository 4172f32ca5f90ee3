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
      store_row_sum(1, unit, region<float>());
    }
    return true;
  }

  // As owner of one segment of the output columns: adds the eight ranks' partial sums in the contract's order and gives
  // everybody the rounded results, two columns a thread.
  __device__ void reduce() {
    const int which = exchange();
    const int owned = hidden() / kRanks, words = owned / 2;
    const Phase phase = which ? Phase::kCombine : Phase::kOutput;
    const int warp = thread_index() / 32, lane = thread_index() % 32;
#pragma unroll 1
    for (int at = (warp * blocks() + first_unit(7)) * 32 + lane; at < rows() * words; at += blocks() * kThreads) {
      const uint32_t two = wait_segments(place_, phase, mine<uint64_t>(w_.partial[which]) + 2 * at, kMaxRows * owned,
                                         place_.epoch, true);
      if (place_.gave_up) return;  // the branch's waits say so
      push_all(w_.branch[which], kMaxRows * words, at, two);
    }
  }

  // Adds the branch that a row-parallel exchange brought to the stream. A unit is a segment of a row; its block norms
  // the whole row for itself, a warp per segment, because the owners' sums of squares would be one more exchange. The
  // GEMM that follows norms the stream's row by its units' sums of squares.
  __device__ bool branch() {
#pragma unroll 1
    for (int unit = first_unit(6); unit < rows() * kSegments; unit += blocks()) {
      if (!run_phase<&RowSteps::fetch_branch>(unit)) return false;  // nothing of this is to be seen
      run_phase<&RowSteps::add_branch>(unit);
    }
    return true;
  }

 private:
  // A unit of the stream is stored and stands in shared memory at x: its sum of squares tells the rank's blocks so.
  __device__ void store_row_sum(int which, int unit, const float* x) {
    const bool storing = thread_index() == kThreads - 1;
    if (storing) fence_rank();  // while the first warp adds
    const float sum = segment_sumsq(hidden() / kSegments, x, s_.partial);
    if (storing) store_slot(mine<uint64_t>(w_.row_sums[which]) + unit, bit_cast<uint32_t>(sum), place_.epoch);
  }

  __device__ static void copy_quad(void* to, const void* from) { ptx::copy16(ptx::shared_address(to), from); }

  // In shared memory: row z that a branch's norm sees; of a unit's columns the stream, alpha and beta; the row's gains.
  struct BranchRegion {
    float* z;
    float4 *stream, *alpha, *beta;
    uint32_t* gains;
  };
  __device__ BranchRegion branch_region() const {
    float* z = region<float>();
    float4* s = reinterpret_cast<float4*>(z + hidden());
    const int quads = hidden() / kRanks / 4;
    return {z, s, s + quads, s + 2 * quads, reinterpret_cast<uint32_t*>(s + 3 * quads)};
  }
  // Residual gates of the running exchange from `column` on.
  __device__ const float* gates(int column) const {
    return global(a_.shared.gates) + (4 * layer() + 2 * exchange()) * hidden() + column;
  }

  // A unit's row: z is the branch itself, or, scale first, the branch times its gain. Warp w waits for segment w.
  // False: somebody gave up.
  __device__ bool fetch_branch(int unit) {
    const int i = unit / kSegments, own = unit % kSegments, owned = hidden() / kRanks, words = owned / 2;
    const int which = exchange(), segment = thread_index() / 32, lane = thread_index() % 32;
    const BranchRegion to = branch_region();
#pragma unroll 1
    for (int q = thread_index(); q < owned / 4; q += kThreads) {  // while we wait
      const int column = own * owned + 4 * q;
      copy_quad(to.stream + q, stream(i) + column);
      copy_quad(to.alpha + q, gates(column));
      copy_quad(to.beta + q, gates(hidden() + column));
    }
    uint32_t* two = reinterpret_cast<uint32_t*>(to.z) + segment * owned;
#pragma unroll 1
    for (int c = 4 * lane; which == 1 && c < words; c += 128)
      copy_quad(to.gains + segment * words + c, reinterpret_cast<const uint32_t*>(gain(2)) + segment * words + c);
    const uint64_t* slots = slots_from(segment, w_.branch[which], kMaxRows * words) + i * words;
#pragma unroll 1
    for (int c = 2 * lane; c < words; c += 64 * kSegments)
      wait_pairs(place_, Phase::kBranch, slots + c, 64, (words - c + 63) / 64, segment, two + 2 * c, 128, 2,
                 kBranchGrace);
    expand_branch();
    return all_alive();
  }

  // The warp's words have come: as floats, times the gain.
  __device__ __forceinline__ void expand_branch() {
    const int owned = hidden() / kRanks, words = owned / 2, segment = thread_index() / 32;
    const BranchRegion to = branch_region();
    uint32_t *two = reinterpret_cast<uint32_t*>(to.z) + segment * owned, *gains = to.gains + segment * words;
    const bool gained = exchange() == 1;
    ptx::wait_all_copies();
    __syncwarp();  // gains and words are the warp's
    const auto expand = [&](int c, uint32_t word, uint32_t gain) {
      const float x = low_bf16(word), y = high_bf16(word);
      reinterpret_cast<float2*>(two)[c] =
          gained ? float2{round_bf16(x * low_bf16(gain)), round_bf16(y * high_bf16(gain))} : float2{x, y};
    };
    int c = thread_index() % 32;
#pragma unroll 1
    for (; c + 3 * 32 < words; c += 4 * 32) {
      uint32_t word[4], gain[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) word[e] = two[2 * (c + e * 32)], gain[e] = gains[c + e * 32];
#pragma unroll
      for (int e = 0; e < 4; ++e) expand(c + e * 32, word[e], gain[e]);
    }
#pragma unroll 1
    for (; c < words; c += 32) expand(c, two[2 * c], gains[c]);
  }

  // A unit's part of the row, normed, into the stream.
  __device__ void add_branch(int unit) {
    const float r = rms_factor(block_sumsq(hidden(), region<float>(), s_.partial), hidden(), p_.post_eps);
    const int i = unit / kSegments, owned = hidden() / kRanks, which = exchange();
    const BranchRegion from = branch_region();
    const bool last = which == 1 && layer() + 1 == p_.layer_end, tap_rank = me() == a_.local[0];
#pragma unroll 1
    for (int q = thread_index(); q < owned / 4; q += kThreads) {
      const auto add = [r](float stream, float alpha, float beta, float y) {
        return canonical(alpha * stream + beta * round_bf16(y * r));
      };
      const int at = unit % kSegments * owned + 4 * q;
      const float4 y = *reinterpret_cast<const float4*>(from.z + at), s = from.stream[q], a = from.alpha[q],
                   b = from.beta[q];
      const float4 sum = {add(s.x, a.x, b.x, y.x), add(s.y, a.y, b.y, y.y), add(s.z, a.z, b.z, y.z),
                          add(s.w, a.w, b.w, y.w)};
      *reinterpret_cast<float4*>(stream(i) + at) = sum;
      from.stream[q] = sum;
      if (!tap_rank) continue;
      const int64_t row = s_.rows.row[i];
      if (last) *reinterpret_cast<float4*>(a_.results.stream + row * hidden() + at) = sum;
      if (a_.results.tap_residuals) {
        const int64_t tap = int64_t{2 * static_cast<int>(layer() - p_.layer_begin) + which} * p_.rows + row;
        *reinterpret_cast<float4*>(a_.results.tap_residuals + tap * hidden() + at) = sum;
      }
    }
    sync_block();
    if (!last) store_row_sum(which, unit, reinterpret_cast<const float*>(from.stream));
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
        const int at = c / half * per_source + i * half + c % half;
#pragma unroll 1
        for (int to = a_.loopback ? me() : 0; to < (a_.loopback ? me() + 1 : kRanks); ++to)
          store_slot(slots_to(to, w_.branch[0], 0) + at, word, place_.epoch);
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
