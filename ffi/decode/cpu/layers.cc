// The fused decode step on the CPU: all layers, all eight ranks. Each rank's weights are used only for that rank's
// share, as on a GPU; what a GPU exchanges between ranks is here the arrays that all ranks write and read.
#include <string>

#include "ffi/comm/pool.h"
#include "ffi/decode/cpu/attention.h"
#include "ffi/decode/cpu/dense.h"
#include "ffi/decode/cpu/experts.h"
#include "ffi/ops/attention/row.h"
#include "ffi/ops/combine/row.h"
#include "ffi/ops/norm/row.h"
#include "ffi/ops/residual/row.h"
#include "ffi/ops/rope/row.h"
#include "ffi/ops/router/row.h"

namespace muse {
namespace {

MUSE_CLONES void embed_row(const uint16_t* table_row, int64_t n, float eps, uint16_t* scratch, float* stream) {
  norm_row(table_row, n, static_cast<const uint16_t*>(nullptr), eps, scratch);
  for (int64_t i = 0; i < n; ++i) stream[i] = canonical(from_bf16(scratch[i]));
}

MUSE_CLONES void norm_stream_row(const float* s, int64_t n, const uint16_t* gain, float eps, uint16_t* h) {
  norm_row(s, n, gain, eps, h);
}

MUSE_CLONES void norm_bf16_row(const uint16_t* x, int64_t n, const uint16_t* gain, float eps, uint16_t* out) {
  norm_row(x, n, gain, eps, out);
}

MUSE_CLONES void norm_scale_first_row(const uint16_t* y, int64_t n, const uint16_t* gain, float eps, uint16_t* out) {
  norm_row_scale_first(y, n, gain, eps, out);
}

MUSE_CLONES void update_row(const float* s, const uint16_t* n, const float* gates, int64_t width, float* out) {
  residual_row(s, n, gates, gates + width, width, out);
}

// rope: 32 cos and 32 sin, or null.
MUSE_CLONES void rope_heads(uint16_t* x, int64_t heads, const float* rope, float eps) {
  for (int64_t h = 0; h < heads; ++h)
    norm_rope_head(x + h * kHeadDim, rope, rope ? rope + kHeadDim / 2 : nullptr, eps, x + h * kHeadDim);
}

MUSE_CLONES void gate_heads(const uint16_t* a, const uint16_t* u, int64_t heads, float eps, uint16_t* o) {
  for (int64_t h = 0; h < heads; ++h) attention_gate_head(a + h * kHeadDim, u + h * kHeadDim, eps, o + h * kHeadDim);
}

MUSE_CLONES float router_dot(int64_t n, const uint16_t* h, const float* w) { return dot(n, h, w); }

MUSE_CLONES void route(const float* dots, const float* bias, const Plan& p, int32_t* experts, float* weights) {
  route_row(dots, bias, p.experts, p.top_k, p.router_multiplier, p.routed_scaling, experts, weights, nullptr);
}

MUSE_CLONES void combine(const uint16_t* f, const float* weights, const int32_t* experts, const Plan& p,
                         const uint16_t* gain, uint16_t* x) {
  combine_row(f, weights, experts, p.top_k, gain, p.moe_hidden, p.post_eps, x);
}

MUSE_CLONES void store_columns(const float* sums, int64_t n, int64_t width, uint16_t* out) {
  for (int64_t i = 0; i < n; ++i)
    for (int c = 0; c < kLanes; ++c) out[i * width + c] = to_bf16(group_sum(sums, n, i, c));
}

class Step {
 public:
  explicit Step(const StepCall& call) : call_(call), p_(call.plan) {}

  Status run() {
    const Status status = resolve_rows(p_, call_.shared, &rows_);
    if (!status.ok()) return status;
    n_ = static_cast<int64_t>(rows_.size());
    clear_results();
    stream_.resize(n_ * p_.hidden);
    if (p_.layer_begin == 0)
      embed();
    else
      for (int64_t i = 0; i < n_; ++i)
        memcpy(stream(i), call_.shared.stream + rows_[i].row * p_.hidden, p_.hidden * sizeof(float));
    for (int64_t l = p_.layer_begin; l < p_.layer_end; ++l) {
      attention(l);
      tap_residual(l, 0);
      moe(l);
      tap_residual(l, 1);
    }
    for (const StepResults& r : call_.results)
      for (int64_t i = 0; i < n_; ++i)
        memcpy(r.stream + rows_[i].row * p_.hidden, stream(i), p_.hidden * sizeof(float));
    return {};
  }

 private:
  float* stream(int64_t i) { return stream_.data() + i * p_.hidden; }

  // Inactive rows read as zeros.
  void clear_results() {
    const int64_t run = p_.layer_end - p_.layer_begin;
    for (const StepResults& r : call_.results) {
      memset(r.stream, 0, p_.rows * p_.hidden * sizeof(float));
      if (!r.tap_residuals) continue;
      memset(r.tap_residuals, 0, run * 2 * p_.rows * p_.hidden * sizeof(float));
      memset(r.tap_experts, 0, run * p_.rows * p_.top_k * sizeof(int32_t));
      memset(r.tap_weights, 0, run * p_.rows * p_.top_k * sizeof(float));
    }
  }

  void embed() {
    parallel_for(n_, [&](int64_t i) {
      std::vector<uint16_t> scratch(p_.hidden);
      const int64_t rank = rows_[i].token / p_.vocab_rank(), row = rows_[i].token % p_.vocab_rank();
      embed_row(call_.rank[rank].embed + row * p_.hidden, p_.hidden, p_.eps, scratch.data(), stream(i));
    });
  }

  // h = gained norm of the stream, as GEMM operand.
  void norm_stream(const uint16_t* gain) {
    h_.resize(n_ * p_.hidden);
    parallel_for(n_, [&](int64_t i) { norm_stream_row(stream(i), p_.hidden, gain, p_.eps, &h_[i * p_.hidden]); });
    operand_.load(h_.data(), n_, p_.hidden);
  }

  void attention(int64_t l) {
    const int64_t q_width = p_.q_heads * kHeadDim, kv_width = p_.kv_heads * kHeadDim;
    norm_stream(call_.shared.hidden_gains + (3 * l) * p_.hidden);
    q_.resize(n_ * q_width);
    u_.resize(n_ * q_width);
    k_.resize(n_ * kv_width);
    v_.resize(n_ * kv_width);
    const int64_t groups = p_.qkvu_rows() / kLanes, blocks = p_.hidden / kBlock;
    parallel_for(kRanks * groups, [&](int64_t item) {
      const int64_t rank = item / groups, group = item % groups;
      std::vector<float> sums(kSegments * n_ * kLanes);
      bf16_group(call_.rank[rank].qkvu + p_.qkvu(l) + group * blocks * kTile, kSegments, blocks / kSegments, operand_,
                 0, nullptr, n_, sums.data());
      store_qkvu(rank, group * kLanes, sums.data());
    });

    const LayerKind kind = p_.kind[l];
    parallel_for(n_, [&](int64_t i) {
      const float* rope = kind.rope ? call_.shared.rope + rows_[i].position * kHeadDim : nullptr;
      rope_heads(&q_[i * q_width], p_.q_heads, rope, p_.eps);
      rope_heads(&k_[i * kv_width], p_.kv_heads, rope, p_.eps);
      append(l, i, &k_[i * kv_width], &v_[i * kv_width]);
    });
    a_.resize(n_ * q_width);
    attend(call_, l, rows_, q_.data(), a_.data());
    o_.resize(n_ * q_width);
    parallel_for(
        n_, [&](int64_t i) { gate_heads(&a_[i * q_width], &u_[i * q_width], p_.q_heads, p_.eps, &o_[i * q_width]); });
    row_parallel(o_.data(), q_width, &RankPointers::o, p_.o(l));
    parallel_for(n_, [&](int64_t i) {
      std::vector<uint16_t> branch(p_.hidden);
      norm_bf16_row(&y_[i * p_.hidden], p_.hidden, nullptr, p_.post_eps, branch.data());
      update_row(stream(i), branch.data(), gates(l, 0), p_.hidden, stream(i));
    });
  }

  // A rank's rows are its q, k, v and u rows in this order, and a group of sixteen lies in one of them.
  void store_qkvu(int64_t rank, int64_t first, const float* sums) {
    const int64_t q = p_.q_columns(), kv = p_.kv_columns(), q_width = kRanks * q, kv_width = kRanks * kv;
    if (first < q) return store_columns(sums, n_, q_width, &q_[rank * q + first]);
    first -= q;
    if (first < kv) return store_columns(sums, n_, kv_width, &k_[rank * kv + first]);
    first -= kv;
    if (first < kv) return store_columns(sums, n_, kv_width, &v_[rank * kv + first]);
    store_columns(sums, n_, q_width, &u_[rank * q + first - kv]);
  }

  void append(int64_t l, int64_t i, uint16_t* k, uint16_t* v) {
    for (int64_t head = 0; head < p_.kv_heads; ++head) {
      canonical_kv(k + head * kHeadDim, v + head * kHeadDim);
      const RankPointers& r = call_.rank[head / p_.kv_rank()];
      const int64_t at = p_.cache(l, rows_[i].sequence, head % p_.kv_rank(), p_.slot(l, rows_[i].write));
      const bool full = p_.kind[l].full;
      memcpy((full ? r.k_full : r.k_ring) + at, k + head * kHeadDim, kHeadDim * sizeof(uint16_t));
      memcpy((full ? r.v_full : r.v_ring) + at, v + head * kHeadDim, kHeadDim * sizeof(uint16_t));
    }
  }

  // y = R(x w^T) with w split by columns: rank r's partial sum is segment r of the contract's GEMM.
  void row_parallel(const uint16_t* x, int64_t width, const uint16_t* RankPointers::* weights, int64_t offset) {
    operand_.load(x, n_, width);
    y_.resize(n_ * p_.hidden);
    const int64_t blocks = width / kRanks / kBlock;
    parallel_for(p_.hidden / kLanes, [&](int64_t group) {
      std::vector<float> partial(kRanks * n_ * kLanes);
      for (int64_t rank = 0; rank < kRanks; ++rank)
        bf16_group(call_.rank[rank].*weights + offset + group * blocks * kTile, 1, blocks, operand_, rank * blocks,
                   nullptr, n_, &partial[rank * n_ * kLanes]);
      store_columns(partial.data(), n_, p_.hidden, &y_[group * kLanes]);
    });
  }

  void moe(int64_t l) {
    norm_stream(call_.shared.hidden_gains + (3 * l + 1) * p_.hidden);
    dots_.resize(n_ * p_.experts);
    parallel_for(n_ * kRanks, [&](int64_t item) {
      const int64_t i = item / kRanks, rank = item % kRanks;
      for (int64_t e = 0; e < p_.experts_rank(); ++e)
        dots_[i * p_.experts + rank * p_.experts_rank() + e] =
            router_dot(p_.hidden, &h_[i * p_.hidden], call_.rank[rank].router + p_.router(l) + e * p_.hidden);
    });
    experts_.resize(n_ * p_.top_k);
    weights_.resize(n_ * p_.top_k);
    for (int64_t i = 0; i < n_; ++i)
      route(&dots_[i * p_.experts], call_.shared.router_bias + l * p_.experts, p_, &experts_[i * p_.top_k],
            &weights_[i * p_.top_k]);
    tap_routing(l);

    const uint16_t* gains = call_.shared.moe_gains + 2 * l * p_.moe_hidden;
    pooled_.resize(n_ * p_.moe_hidden);
    const int64_t groups = p_.moe_columns() / kLanes, blocks = p_.hidden / kBlock;
    parallel_for(kRanks * groups, [&](int64_t item) {
      const int64_t rank = item / groups, group = item % groups;
      std::vector<float> sums(kSegments * n_ * kLanes);
      bf16_group(call_.rank[rank].pre_expert + p_.pre_expert(l) + group * blocks * kTile, kSegments, blocks / kSegments,
                 operand_, 0, nullptr, n_, sums.data());
      store_columns(sums.data(), n_, p_.moe_hidden, &pooled_[rank * p_.moe_columns() + group * kLanes]);
    });
    normed_.resize(n_ * p_.moe_hidden);
    parallel_for(n_, [&](int64_t i) {
      norm_bf16_row(&pooled_[i * p_.moe_hidden], p_.moe_hidden, gains, p_.eps, &normed_[i * p_.moe_hidden]);
    });
    f_.resize(n_ * p_.top_k * p_.moe_hidden);
    run_experts(call_, l, n_, normed_.data(), experts_.data(), f_.data());
    parallel_for(n_, [&](int64_t i) {
      combine(&f_[i * p_.top_k * p_.moe_hidden], &weights_[i * p_.top_k], &experts_[i * p_.top_k], p_,
              gains + p_.moe_hidden, &pooled_[i * p_.moe_hidden]);
    });
    row_parallel(pooled_.data(), p_.moe_hidden, &RankPointers::post_expert, p_.post_expert(l));
    parallel_for(n_, [&](int64_t i) {
      std::vector<uint16_t> branch(p_.hidden);
      norm_scale_first_row(&y_[i * p_.hidden], p_.hidden, call_.shared.hidden_gains + (3 * l + 2) * p_.hidden,
                           p_.post_eps, branch.data());
      update_row(stream(i), branch.data(), gates(l, 2), p_.hidden, stream(i));
    });
  }

  const float* gates(int64_t l, int which) const { return call_.shared.gates + (4 * l + which) * p_.hidden; }

  void tap_residual(int64_t l, int which) {
    for (const StepResults& r : call_.results)
      for (int64_t i = 0; r.tap_residuals && i < n_; ++i)
        memcpy(r.tap_residuals + ((2 * (l - p_.layer_begin) + which) * p_.rows + rows_[i].row) * p_.hidden, stream(i),
               p_.hidden * sizeof(float));
  }

  void tap_routing(int64_t l) {
    for (const StepResults& r : call_.results)
      for (int64_t i = 0; r.tap_residuals && i < n_; ++i) {
        const int64_t at = ((l - p_.layer_begin) * p_.rows + rows_[i].row) * p_.top_k;
        memcpy(r.tap_experts + at, &experts_[i * p_.top_k], p_.top_k * sizeof(int32_t));
        memcpy(r.tap_weights + at, &weights_[i * p_.top_k], p_.top_k * sizeof(float));
      }
  }

  const StepCall& call_;
  const Plan& p_;
  std::vector<ActiveRow> rows_;
  int64_t n_ = 0;  // active rows; all arrays below hold only these
  std::vector<float> stream_, dots_, weights_;
  std::vector<int32_t> experts_;
  std::vector<uint16_t> h_, q_, k_, v_, u_, a_, o_, y_, pooled_, normed_, f_;
  Operand16 operand_;
};

}  // namespace

Status decode_layers_cpu(const StepCall& call) { return Step(call).run(); }

}  // namespace muse
