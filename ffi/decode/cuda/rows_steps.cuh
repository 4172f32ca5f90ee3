// Rows, one block each: embedding, norms, the residual stream; and the row-parallel GEMM whose exchange feeds them.
#pragma once

#include "ffi/decode/cuda/dense.cuh"

namespace muse {

__device__ __forceinline__ uint32_t pack(uint16_t low, uint16_t high) {
  return static_cast<uint32_t>(low) | static_cast<uint32_t>(high) << 16;
}

class RowSteps : protected DenseSteps {
 public:
  using DenseSteps::DenseSteps;

 protected:
  // The stream at the start: the embedding of the rows' tokens, or what an earlier range of layers left.
  __device__ bool start() {
    if (p_.layer_begin == 0 && !embed()) return false;
    float* x = region<float>();
    for (int i = place_.index; i < rows(); i += place_.size) {
      sync_block();
      const float* from = p_.layer_begin == 0 ? stream(i) : a_.shared.stream + s_.rows.row[i] * p_.hidden;
      for (int64_t c = thread_index(); c < p_.hidden; c += kThreads) stream(i)[c] = x[c] = from[c];
      sync_block();
      if (p_.layer_begin < p_.layer_end) norm_to_h(i, x, gain(p_.layer_begin, 0));
    }
    return true;
  }

  // The owner of a token's embedding row norms it and gives it to everybody through the branch slots.
  __device__ bool embed() {
    next_epoch();
    const int64_t half = p_.hidden / kRanks / 2, per_source = kMaxRows * half;
    float* x = region<float>();
    for (int i = place_.index; i < rows(); i += place_.size) {
      const int32_t token = s_.rows.token[i];
      if (token / p_.vocab_rank() != me()) continue;
      const uint16_t* row = weights().embed + token % p_.vocab_rank() * p_.hidden;
      sync_block();
      for (int64_t c = thread_index(); c < p_.hidden; c += kThreads) x[c] = from_bf16(row[c]);
      sync_block();
      const float r = inverse_rms(block_sumsq(p_.hidden, x, s_.partial), p_.hidden, p_.eps);
      for (int64_t c = thread_index(); c < p_.hidden / 2; c += kThreads) {
        const uint32_t word = pack(to_bf16(x[2 * c] * r), to_bf16(x[2 * c + 1] * r));
        // Here the source is the part of the row, not the rank.
        for (int to = a_.loopback ? me() : 0; to < (a_.loopback ? me() + 1 : kRanks); ++to)
          store_slot(reinterpret_cast<uint64_t*>(a_.workspace[to] + w_.branch[0]) + c / half * per_source + i * half +
                         c % half,
                     word, place_.epoch);
      }
    }
    for (int i = place_.index; i < rows(); i += place_.size)
      for (int64_t c = thread_index(); c < p_.hidden / 2; c += kThreads) {
        uint32_t word[1] = {};
        wait(
            Phase::kEmbed,
            [&](int) {
              return slots_from(static_cast<int>(c / half), w_.branch[0], per_source) + i * half + c % half;
            },
            [&](int) { return s_.rows.token[i] / p_.vocab_rank(); }, word);
        stream(i)[2 * c] = canonical(from_bf16(static_cast<uint16_t>(word[0])));
        stream(i)[2 * c + 1] = canonical(from_bf16(static_cast<uint16_t>(word[0] >> 16)));
      }
    return all_alive();
  }

  // A row of the stream -> the GEMM operand h.
  __device__ void norm_to_h(int i, const float* x, const uint16_t* g) {
    const float r = inverse_rms(block_sumsq(p_.hidden, x, s_.partial), p_.hidden, p_.eps);
    uint16_t* h = mine<uint16_t>(w_.h);
    for (int64_t c = 2 * thread_index(); c < p_.hidden; c += 2 * kThreads)
      *reinterpret_cast<uint32_t*>(h + column_tile_at(i, c, p_.hidden)) =
          pack(to_bf16((x[c] * r) * from_bf16(g[c])), to_bf16((x[c + 1] * r) * from_bf16(g[c + 1])));
  }

  // Adds the branch that the row-parallel exchange `which` brought to the stream, and norms it for what follows.
  __device__ bool branch(int64_t l, int which) {
    const int64_t half = p_.hidden / kRanks / 2, per_source = kMaxRows * half;
    float *x = region<float>(), *y = x + p_.hidden;
    for (int i = place_.index; i < rows(); i += place_.size) {
      sync_block();
      constexpr int kWords = 4;  // a thread's words at once, kThreads apart
      for (int64_t c0 = thread_index(); c0 < p_.hidden / 2; c0 += kWords * kThreads) {
        const auto at = [&](int e) { return min(c0 + e * kThreads, p_.hidden / 2 - 1); };
        uint32_t word[kWords] = {};
        wait(
            Phase::kBranch,
            [&](int e) {
              return slots_from(static_cast<int>(at(e) / half), w_.branch[which], per_source) + i * half + at(e) % half;
            },
            [&](int e) { return static_cast<int>(at(e) / half); }, word);
        for (int e = 0; e < kWords; ++e) {
          const int64_t c = at(e);
          float y0 = from_bf16(static_cast<uint16_t>(word[e])), y1 = from_bf16(static_cast<uint16_t>(word[e] >> 16));
          if (which == 1) {  // scale first
            y0 = round_bf16(y0 * from_bf16(gain(l, 2)[2 * c]));
            y1 = round_bf16(y1 * from_bf16(gain(l, 2)[2 * c + 1]));
          }
          y[2 * c] = y0;
          y[2 * c + 1] = y1;
        }
      }
      if (!all_alive()) return false;
      const float r = inverse_rms(block_sumsq(p_.hidden, y, s_.partial), p_.hidden, p_.post_eps);
      const float *alpha = a_.shared.gates + (4 * l + 2 * which) * p_.hidden, *beta = alpha + p_.hidden;
      for (int64_t c = thread_index(); c < p_.hidden; c += kThreads) {
        const float s = canonical(alpha[c] * stream(i)[c] + beta[c] * round_bf16(y[c] * r));
        stream(i)[c] = x[c] = s;
        if (a_.results.tap_residuals && me() == a_.local[0])
          a_.results.tap_residuals[((2 * (l - p_.layer_begin) + which) * p_.rows + s_.rows.row[i]) * p_.hidden + c] = s;
      }
      sync_block();
      if (which == 0 || l + 1 < p_.layer_end) norm_to_h(i, x, which == 0 ? gain(l, 1) : gain(l + 1, 0));
    }
    return true;
  }

  __device__ void store_stream() {
    if (me() != a_.local[0]) return;
    for (int i = place_.index; i < rows(); i += place_.size)
      for (int64_t c = thread_index(); c < p_.hidden; c += kThreads)
        a_.results.stream[s_.rows.row[i] * p_.hidden + c] = stream(i)[c];
  }

  // Row-parallel bf16 GEMM: this rank's columns are one segment; its partial sums go to the owners of the output
  // columns, which add the eight in the contract's order and give everybody the rounded result.
  __device__ bool row_parallel(const DenseJob& job, const uint16_t* operand, int64_t width, int which, Phase phase) {
    const int lane = thread_index() % 32, g = lane / 4, t = lane % 4;
    const int64_t owned = p_.hidden / kRanks, per_source = kMaxRows * owned;
    dense(
        job, operand, width,
        [&](int group, int, int i0, const Accumulators& acc) {
          for (int b = 0; b < 2; ++b)
            for (int j = 0; j < 4; ++j) {
              const int i = i0 + 8 * b + 2 * t + (j & 1);
              const int64_t column = group * 16 + g + 8 * (j >> 1);
              if (i < rows())
                store_slot(slots_to(static_cast<int>(column / owned), w_.partial[which], per_source) + i * owned +
                               column % owned,
                           bit_cast<uint32_t>(acc[b][j]), place_.epoch);
            }
        },
        [](int, Range) {});
    // As owner: columns me() * owned ..., two per thread; neighbouring warps' work goes to different blocks.
    const int64_t half = owned / 2;
    const int64_t stride = int64_t{place_.size} * kThreads;
    for (int64_t at = (thread_index() / 32 * int64_t{place_.size} + place_.index) * 32 + lane; at < rows() * half;
         at += stride) {
      const int64_t i = at / half, c = at % half;
      uint32_t word[2 * kRanks] = {};
      wait(
          phase,
          [&](int e) { return slots_from(e / 2, w_.partial[which], per_source) + i * owned + 2 * c + e % 2; },
          [](int e) { return e / 2; }, word);
      float s[2][kRanks];
#pragma unroll
      for (int e = 0; e < 2 * kRanks; ++e) s[e % 2][e / 2] = bit_cast<float>(word[e]);
      push_all(w_.branch[which], kMaxRows * half, i * half + c, pack(to_bf16(tree8(s[0])), to_bf16(tree8(s[1]))));
    }
    return all_alive();
  }
};

}  // namespace muse
