// Rows, one block each: embedding, norms, the residual stream; and the row-parallel GEMM whose exchange feeds them.
#pragma once

#include "ffi/decode/cuda/step.cuh"

namespace muse {

class RowSteps : protected StepBase {
 public:
  using StepBase::epoch;
  using StepBase::StepBase;

 protected:
  // The owner of a token's embedding row norms it and gives it to everybody through the branch slots.
  __device__ bool embed() {
    ++place_.epoch;
    const int64_t half = p_.hidden / kRanks / 2, per_source = kMaxRows * half;
    for (int i = place_.index; i < n_; i += place_.size) {
      const int32_t token = s_.rows.token[i];
      if (token / p_.vocab_rank() != me_) continue;
      const uint16_t* row = weights().embed + token % p_.vocab_rank() * p_.hidden;
      for (int64_t c = threadIdx.x; c < p_.hidden; c += kThreads) s_.row[c] = from_bf16(row[c]);
      __syncthreads();
      const float r = inverse_rms(block_sumsq(p_.hidden, s_.row, s_.partial), p_.hidden, p_.eps);
      for (int64_t c = threadIdx.x; c < p_.hidden / 2; c += kThreads) {
        const uint32_t word = pack(to_bf16(s_.row[2 * c] * r), to_bf16(s_.row[2 * c + 1] * r));
        for (int to = 0; to < kRanks; ++to)
          store_slot(slots(to, w_.branch[0], static_cast<int>(c / half), per_source) + i * half + c % half, word,
                     place_.epoch);
      }
      __syncthreads();
    }
    bool alive = true;
    for (int i = place_.index; i < n_; i += place_.size)
      for (int64_t c = threadIdx.x; c < p_.hidden / 2; c += kThreads) {
        const uint64_t* slot = slots(me_, w_.branch[0], static_cast<int>(c / half), per_source) + i * half + c % half;
        const uint32_t word =
            wait_slot(place_, slot, place_.epoch, Phase::kEmbed, s_.rows.token[i] / p_.vocab_rank(), alive);
        stream(i)[2 * c] = canonical(from_bf16(static_cast<uint16_t>(word)));
        stream(i)[2 * c + 1] = canonical(from_bf16(static_cast<uint16_t>(word >> 16)));
      }
    return __syncthreads_and(alive);
  }

  // h of the first layer; later ones are made where the stream is updated.
  __device__ void first_norm() {
    for (int i = place_.index; i < n_; i += place_.size) {
      __syncthreads();
      for (int64_t c = threadIdx.x; c < p_.hidden; c += kThreads) s_.row[c] = stream(i)[c];
      __syncthreads();
      norm_to_h(i, gain(p_.layer_begin, 0));
    }
  }

  // s_.row[0 .. hidden) -> the GEMM operand h of row i.
  __device__ void norm_to_h(int i, const uint16_t* g) {
    const float r = inverse_rms(block_sumsq(p_.hidden, s_.row, s_.partial), p_.hidden, p_.eps);
    uint16_t* h = mine<uint16_t>(w_.h) + i * p_.hidden;
    for (int64_t c = threadIdx.x; c < p_.hidden; c += kThreads)
      h[permuted(c)] = to_bf16((s_.row[c] * r) * from_bf16(g[c]));
  }

  // Adds the branch that the row-parallel exchange `which` brought to the stream, and norms it for what follows.
  __device__ bool branch(int64_t l, int which) {
    const int64_t half = p_.hidden / kRanks / 2, per_source = kMaxRows * half;
    float* y = s_.row + p_.hidden;
    bool alive = true;
    for (int i = place_.index; i < n_; i += place_.size) {
      __syncthreads();
      for (int64_t c = threadIdx.x; c < p_.hidden / 2; c += kThreads) {
        const int owner = static_cast<int>(c / half);
        const uint32_t word = wait_slot(place_, slots(me_, w_.branch[which], owner, per_source) + i * half + c % half,
                                        place_.epoch, Phase::kBranch, owner, alive);
        y[2 * c] = from_bf16(static_cast<uint16_t>(word));
        y[2 * c + 1] = from_bf16(static_cast<uint16_t>(word >> 16));
      }
      if (!__syncthreads_and(alive)) return false;
      if (which == 1)  // scale first
        for (int64_t c = threadIdx.x; c < p_.hidden; c += kThreads) y[c] = round_bf16(y[c] * from_bf16(gain(l, 2)[c]));
      __syncthreads();
      const float r = inverse_rms(block_sumsq(p_.hidden, y, s_.partial), p_.hidden, p_.post_eps);
      const float *alpha = a_.shared.gates + (4 * l + 2 * which) * p_.hidden, *beta = alpha + p_.hidden;
      for (int64_t c = threadIdx.x; c < p_.hidden; c += kThreads) {
        const float s = canonical(alpha[c] * stream(i)[c] + beta[c] * round_bf16(y[c] * r));
        stream(i)[c] = s_.row[c] = s;
        if (a_.results.tap_residuals && me_ == a_.local[0])
          a_.results.tap_residuals[((2 * (l - p_.layer_begin) + which) * p_.rows + s_.rows.row[i]) * p_.hidden + c] = s;
      }
      __syncthreads();
      if (which == 0)
        norm_to_h(i, gain(l, 1));
      else if (l + 1 < p_.layer_end)
        norm_to_h(i, gain(l + 1, 0));
    }
    return true;
  }

  __device__ void store_stream() {
    if (me_ != a_.local[0]) return;
    for (int i = place_.index; i < n_; i += place_.size)
      for (int64_t c = threadIdx.x; c < p_.hidden; c += kThreads)
        a_.results.stream[s_.rows.row[i] * p_.hidden + c] = stream(i)[c];
  }

  // Row-parallel bf16 GEMM: this rank's columns are one segment; its partial sums go to the owners of the output
  // columns, which add the eight in the contract's order and give everybody the rounded result.
  __device__ bool row_parallel(const uint16_t* tiles, const uint16_t* operand, int64_t width, int which, Phase phase) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int64_t blocks = width / 16, owned = p_.hidden / kRanks, per_source = kMaxRows * owned;
    for (int64_t group = place_.index * kWarps + warp; group < p_.hidden / 16; group += place_.size * kWarps)
      for (int c0 = 0; c0 < n_; c0 += kColumns) {
        Accumulators acc;
        clear(acc);
        chain_bf16(tiles + group * blocks * kTile, blocks, columns(operand, width, c0, n_, nullptr, 1), acc);
        for (int b = 0; b < 2; ++b)
          for (int j = 0; j < 4; ++j) {
            const int i = c0 + 8 * b + 2 * t + (j & 1);
            const int64_t column = group * 16 + g + 8 * (j >> 1);
            if (i >= n_) continue;
            uint64_t* slot = slots(static_cast<int>(column / owned), w_.partial[which], me_, per_source) + i * owned;
            store_slot(slot + column % owned, bit_cast<uint32_t>(acc[b][j]), place_.epoch);
          }
      }
    // As owner: columns me_ * owned ..., two per thread.
    const int64_t half = owned / 2;
    bool alive = true;
    for (int64_t at = place_.index * kThreads + threadIdx.x; at < n_ * half; at += int64_t{place_.size} * kThreads) {
      const int64_t i = at / half, c = at % half;
      uint16_t y[2];
      for (int e = 0; e < 2; ++e) {
        float s[kRanks];
        for (int r = 0; r < kRanks; ++r)
          s[r] = bit_cast<float>(wait_slot(place_, slots(me_, w_.partial[which], r, per_source) + i * owned + 2 * c + e,
                                           place_.epoch, phase, r, alive));
        y[e] = to_bf16(tree8(s));
      }
      if (!alive) break;
      push_all(w_.branch[which], kMaxRows * half, i * half + c, pack(y[0], y[1]));
    }
    return __syncthreads_and(alive);
  }
};

}  // namespace muse
