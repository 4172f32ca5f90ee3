// Rows, one block each: embedding, norms, the residual stream, and the owners' part of a row-parallel GEMM.
//
// A thread works on quads, four neighbouring columns, with all its loads in flight at once: a row is the work of one
// block, and everybody waits for it.
#pragma once

#include "ffi/decode/cuda/dense_steps.cuh"

namespace muse {

class RowSteps : public DenseSteps {
 public:
  using DenseSteps::DenseSteps;

  // The stream at the start: the embedding of the rows' tokens, or what an earlier range of layers left. Results of
  // inactive rows are zeros.
  __device__ bool start() {
    clear_inactive();
    if (p_.layer_begin == 0 && !embed()) return false;
    float* x = region<float>();
#pragma unroll 1
    for (int i = block(); i < rows(); i += blocks()) {
      sync_block();
      const float* from = p_.layer_begin == 0 ? stream(i) : a_.shared.stream + s_.rows.row[i] * hidden();
#pragma unroll 1
      for (int c = thread_index(); c < hidden(); c += kThreads) stream(i)[c] = x[c] = from[c];
      sync_block();
      if (p_.layer_begin < p_.layer_end) run_phase<&RowSteps::norm_to_h>(i, x, gain(p_.layer_begin, 0));
    }
    return true;
  }

  // As owner of output columns me() * hidden / 8 ...: adds the eight ranks' partial sums in the contract's order and
  // gives everybody the rounded result, two columns per thread; neighbouring warps' work goes to different blocks.
  __device__ bool reduce(int which) {
    const int lane = thread_index() % 32, owned = hidden() / kRanks, half = owned / 2, per_source = kMaxRows * owned;
    const Phase phase = which ? Phase::kCombine : Phase::kOutput;
#pragma unroll 1
    for (int at = (thread_index() / 32 * blocks() + block()) * 32 + lane; at < rows() * half;
         at += blocks() * kThreads) {
      const int i = at / half, c = at - i * half;
      const uint64_t* first = slots_from(0, w_.partial[which], per_source) + i * owned + 2 * c;
      uint32_t word[2 * kRanks] = {};
      wait(phase, [&](int e) { return first + e / 2 * per_source + e % 2; }, [](int e) { return e / 2; }, word);
      float s[2][kRanks];
#pragma unroll
      for (int e = 0; e < 2 * kRanks; ++e) s[e % 2][e / 2] = bit_cast<float>(word[e]);
      push_all(w_.branch[which], kMaxRows * half, at, pack(to_bf16(tree8(s[0])), to_bf16(tree8(s[1]))));
    }
    return all_alive();
  }

  // Adds the branch that the row-parallel exchange `which` brought to the stream, and norms it for what follows.
  __device__ bool branch(int64_t l, int which) {
    float *x = region<float>(), *y = x + hidden();
    const float* alpha = a_.shared.gates + (4 * static_cast<int>(l) + 2 * which) * hidden();
    const float* beta = alpha + hidden();
    const uint16_t* scale = gain(l, 2);
#pragma unroll 1
    for (int i = first_row(kBranchRows); i < rows(); i += blocks()) {
      sync_block();
#pragma unroll 1
      for (int q0 = thread_index(); q0 < hidden() / 4; q0 += kQuads * kThreads) {
        uint32_t word[2 * kQuads] = {};
        const int half = hidden() / kRanks / 2;
        const auto index = [&](int e) { return 2 * quad(q0, e / 2) + e % 2; };  // of a pair of columns
        wait(
            Phase::kBranch,
            [&](int e) {
              const int owner = index(e) / half;
              return slots_from(owner, w_.branch[which], kMaxRows * half) + i * half + index(e) - owner * half;
            },
            [&](int e) { return index(e) / half; }, word);
#pragma unroll
        for (int e = 0; e < kQuads; ++e) {
          float4 v = {low_bf16(word[2 * e]), high_bf16(word[2 * e]), low_bf16(word[2 * e + 1]),
                      high_bf16(word[2 * e + 1])};
          if (which == 1) {  // scale first
            const float4 g = gains_of(scale, quad(q0, e));
            v = {round_bf16(v.x * g.x), round_bf16(v.y * g.y), round_bf16(v.z * g.z), round_bf16(v.w * g.w)};
          }
          reinterpret_cast<float4*>(y)[quad(q0, e)] = v;
        }
      }
      if (!all_alive()) return false;
      const float r = inverse_rms(block_sumsq(hidden(), y, s_.partial), hidden(), p_.post_eps);
      float* tap =
          a_.results.tap_residuals && me() == a_.local[0]
              ? a_.results.tap_residuals +
                    (int64_t{2 * static_cast<int>(l - p_.layer_begin) + which} * p_.rows + s_.rows.row[i]) * hidden()
              : nullptr;
#pragma unroll 1
      for (int q0 = thread_index(); q0 < hidden() / 4; q0 += kQuads * kThreads) {
        float4 s[kQuads], a[kQuads], b[kQuads];
#pragma unroll
        for (int e = 0; e < kQuads; ++e) {
          s[e] = reinterpret_cast<const float4*>(stream(i))[quad(q0, e)];
          a[e] = __ldg(reinterpret_cast<const float4*>(alpha) + quad(q0, e));
          b[e] = __ldg(reinterpret_cast<const float4*>(beta) + quad(q0, e));
        }
#pragma unroll
        for (int e = 0; e < kQuads; ++e) {
          const float4 v = reinterpret_cast<const float4*>(y)[quad(q0, e)];
          const auto add = [r](float stream, float alpha, float beta, float y) {
            return canonical(alpha * stream + beta * round_bf16(y * r));
          };
          const float4 sum = {add(s[e].x, a[e].x, b[e].x, v.x), add(s[e].y, a[e].y, b[e].y, v.y),
                              add(s[e].z, a[e].z, b[e].z, v.z), add(s[e].w, a[e].w, b[e].w, v.w)};
          if (q0 + e * kThreads >= hidden() / 4) break;  // the clamped quad is another thread's to change
          reinterpret_cast<float4*>(stream(i))[q0 + e * kThreads] = sum;
          reinterpret_cast<float4*>(x)[q0 + e * kThreads] = sum;
          if (tap) reinterpret_cast<float4*>(tap)[q0 + e * kThreads] = sum;
        }
      }
      sync_block();
      if (which == 0 || l + 1 < p_.layer_end)
        run_phase<&RowSteps::norm_to_h>(i, x, which == 0 ? gain(l, 1) : gain(l + 1, 0));
    }
    return true;
  }

  __device__ void store_stream() {
    if (me() != a_.local[0]) return;
#pragma unroll 1
    for (int i = first_row(kBranchRows); i < rows(); i += blocks())
#pragma unroll 1
      for (int c = thread_index(); c < hidden(); c += kThreads)
        a_.results.stream[s_.rows.row[i] * hidden() + c] = stream(i)[c];
  }

 private:
  static constexpr int kQuads = 2;  // of a thread at once: more would be code that the instruction cache cannot hold

  // A thread's quads lie kThreads apart; past the end the last one is read again.
  __device__ int quad(int q0, int e) const { return min(q0 + e * kThreads, hidden() / 4 - 1); }

  __device__ static float4 gains_of(const uint16_t* g, int quad) {
    const uint2 two = __ldg(reinterpret_cast<const uint2*>(g) + quad);
    return {low_bf16(two.x), high_bf16(two.x), low_bf16(two.y), high_bf16(two.y)};
  }

  // The owner of a token's embedding row norms it and gives it to everybody through the branch slots.
  __device__ bool embed() {
    next_epoch();
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
      const float r = inverse_rms(block_sumsq(hidden(), x, s_.partial), hidden(), p_.eps);
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
#pragma unroll 1
    for (int i = block(); i < rows(); i += blocks())
#pragma unroll 1
      for (int c = thread_index(); c < hidden() / 2; c += kThreads) {
        uint32_t word[1] = {};
        wait(
            Phase::kEmbed, [&](int) { return slots_from(c / half, w_.branch[0], per_source) + i * half + c % half; },
            [&](int) { return s_.rows.token[i] / own; }, word);
        stream(i)[2 * c] = canonical(low_bf16(word[0]));
        stream(i)[2 * c + 1] = canonical(high_bf16(word[0]));
      }
    return all_alive();
  }

  // A row of the stream -> the GEMM operand h.
  __device__ void norm_to_h(int i, float* x, const uint16_t* g) {
    const float r = inverse_rms(block_sumsq(hidden(), x, s_.partial), hidden(), p_.eps);
    uint16_t* h = mine<uint16_t>(w_.h);
#pragma unroll 1
    for (int q0 = thread_index(); q0 < hidden() / 4; q0 += kQuads * kThreads) {
      float4 gains[kQuads];
#pragma unroll
      for (int e = 0; e < kQuads; ++e) gains[e] = gains_of(g, quad(q0, e));
#pragma unroll
      for (int e = 0; e < kQuads; ++e) {
        const float4 v = reinterpret_cast<const float4*>(x)[quad(q0, e)], n = gains[e];
        uint32_t* to = reinterpret_cast<uint32_t*>(h + column_tile_at(i, 4 * quad(q0, e), hidden()));
        to[0] = pack(to_bf16((v.x * r) * n.x), to_bf16((v.y * r) * n.y));
        to[4] = pack(to_bf16((v.z * r) * n.z), to_bf16((v.w * r) * n.w));  // the next lane's
      }
    }
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
      for (int64_t l = 0; l < layers; ++l) {
        for (int which = 0; which < 2; ++which)
          clear(a_.results.tap_residuals + ((2 * l + which) * p_.rows + t) * hidden(), hidden());
        clear(a_.results.tap_experts + (l * p_.rows + t) * top_k(), top_k());
        clear(a_.results.tap_weights + (l * p_.rows + t) * top_k(), top_k());
      }
    }
  }
};

}  // namespace muse
