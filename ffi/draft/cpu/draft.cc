// A whole draft on the CPU, step by step as muse_jax/speculative/dflash_reference.py has it.
#include "ffi/draft/draft.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "ffi/comm/pool.h"
#include "ffi/draft/cpu/tree.h"
#include "ffi/draft/row.h"
#include "ffi/ops/gemm/gemm.h"
#include "ffi/ops/norm/norm.h"

namespace muse {
namespace {

using Rows = std::vector<uint16_t>;

class Draft {
 public:
  explicit Draft(const DraftCall& call) : c_(call), p_(call.plan) {}

  void run() {
    if (p_.fed > 0) inject();
    if (p_.width == 0) return;
    embed();
    for (int64_t l = 0; l < p_.layers; ++l) layer(c_.layer[l], l);
    propose(norm(x_, p_.hidden, c_.norm));
  }

 private:
  // [n, inner] x [columns, inner] -> [n, columns], rounded or not.
  Rows linear(const Rows& x, int64_t inner, const uint16_t* w, int64_t columns) const {
    const int64_t n = static_cast<int64_t>(x.size()) / inner;
    Rows y(n * columns);
    gemm(nullptr, {n, columns, inner, true}, x.data(), w, y.data());
    return y;
  }
  static std::vector<float> wide_gemm(const Rows& x, int64_t inner, const uint16_t* w, int64_t columns) {
    const int64_t n = static_cast<int64_t>(x.size()) / inner;
    std::vector<float> y(n * columns);
    gemm(nullptr, {n, columns, inner, false}, x.data(), w, y.data());
    return y;
  }

  Rows norm(const Rows& x, int64_t columns, const uint16_t* weight) const {
    Rows y(x.size());
    parallel_for(static_cast<int64_t>(x.size()) / columns, [&](int64_t i) {
      const uint16_t* row = &x[i * columns];
      const float r = inverse_rms(sumsq(columns, row), columns, p_.eps);
      for (int64_t j = 0; j < columns; ++j) y[i * columns + j] = draft_norm(row[j], r, weight[j]);
    });
    return y;
  }

  // Every head of [n, heads, head_dim] normalised and turned to its row's position.
  template <typename Position>
  void finish_heads(Rows* rows, int64_t heads, const uint16_t* weight, Position position) const {
    const int64_t d = p_.head_dim, half = d / 2;
    parallel_for(static_cast<int64_t>(rows->size()) / (heads * d), [&](int64_t i) {
      std::vector<float> cosine(half), sine(half);
      for (int64_t j = 0; j < half; ++j)
        cos_sin(static_cast<float>(position(i)) * c_.frequencies[j], &cosine[j], &sine[j]);
      for (int64_t head = 0; head < heads; ++head) {
        uint16_t* x = rows->data() + (i * heads + head) * d;
        const float r = inverse_rms(lanes(d, x, x), d, p_.eps);
        for (int64_t j = 0; j < d; ++j) x[j] = draft_norm(x[j], r, weight[j]);
        for (int64_t j = 0; j < half; ++j) draft_rotate(cosine[j], sine[j], &x[j], &x[j + half]);
      }
    });
  }

  void inject() {
    const Rows features(c_.features, c_.features + p_.batch * p_.fed * p_.taps * p_.hidden);
    const Rows shared = norm(linear(features, p_.taps * p_.hidden, c_.fc, p_.hidden), p_.hidden, c_.hidden_norm);
    const int64_t width = p_.kv_columns();
    for (int64_t l = 0; l < p_.layers; ++l) {
      const DraftLayer& layer = c_.layer[l];
      Rows k = linear(shared, p_.hidden, layer.k, width);
      const Rows v = linear(shared, p_.hidden, layer.v, width);
      const auto position = [&](int64_t i) { return c_.first[i / p_.fed] + static_cast<int32_t>(i % p_.fed); };
      finish_heads(&k, p_.kv_heads, layer.k_norm, position);
      for (int64_t i = 0; i < p_.batch * p_.fed; ++i) {
        const int64_t b = i / p_.fed, t = i % p_.fed, slots = p_.slots[l];
        // Of more tokens than the ring holds only the last count.
        if (t >= c_.count[b] || t < c_.count[b] - slots) continue;
        const int64_t at = b * slots + position(i) % slots;
        layer.ring_position[at] = position(i);
        for (int64_t j = 0; j < width; ++j) {
          layer.ring_k[at * width + j] = draft_finite(k[i * width + j]);
          layer.ring_v[at * width + j] = draft_finite(v[i * width + j]);
        }
      }
    }
  }

  void embed() {
    x_.resize(p_.rows() * p_.hidden);
    for (int64_t i = 0; i < p_.rows(); ++i) {
      const uint16_t* from = i % p_.block ? c_.mask : c_.embedding + c_.token[i / p_.block] * p_.hidden;
      std::copy(from, from + p_.hidden, &x_[i * p_.hidden]);
    }
  }

  // Side 0 (before the sublayer) or 1 (after it); coefficients [rows, 2 sides, 2 taps, H / group].
  Rows convolve(const DraftConvolution& conv, const Rows& coefficients, int64_t side, Rows z) const {
    if (p_.group == 0) return z;
    const int64_t h = p_.hidden, groups = h / p_.group;
    Rows y(z.size());
    parallel_for(p_.rows(), [&](int64_t i) {
      const uint16_t* base = conv.base + side * 2 * h;
      const uint16_t* c = &coefficients[i * p_.conv_rows() + side * 2 * groups];
      for (int64_t j = 0; j < h; ++j)
        y[i * h + j] = draft_convolve(base[j], c[j / p_.group], z[i * h + j], base[h + j], c[groups + j / p_.group],
                                      i % p_.block ? z[(i - 1) * h + j] : uint16_t{0});
    });
    return y;
  }

  // x += the sublayer of its norm, between its two convolutions.
  template <typename Body>
  void sublayer(const uint16_t* weight, const DraftConvolution& conv, Body body) {
    const Rows h = norm(x_, p_.hidden, weight);
    const Rows coefficients = p_.group ? linear(h, p_.hidden, conv.projection, p_.conv_rows()) : Rows();
    const Rows y = convolve(conv, coefficients, 1, body(convolve(conv, coefficients, 0, h)));
    for (size_t i = 0; i < x_.size(); ++i) x_[i] = draft_add(x_[i], y[i]);
  }

  void layer(const DraftLayer& layer, int64_t l) {
    sublayer(layer.input_norm, layer.attention, [&](const Rows& h) { return attention(layer, l, h); });
    sublayer(layer.post_norm, layer.mlp, [&](const Rows& h) {
      Rows gate = linear(h, p_.hidden, layer.gate, p_.inner);
      const Rows up = linear(h, p_.hidden, layer.up, p_.inner);
      parallel_for(p_.rows(), [&](int64_t i) {
        for (int64_t j = i * p_.inner; j < (i + 1) * p_.inner; ++j) gate[j] = draft_swiglu(gate[j], up[j]);
      });
      return linear(gate, p_.inner, layer.down, p_.hidden);
    });
  }

  Rows attention(const DraftLayer& layer, int64_t l, const Rows& h) const {
    Rows q = linear(h, p_.hidden, layer.q, p_.q_columns()), k = linear(h, p_.hidden, layer.k, p_.kv_columns());
    const Rows v = linear(h, p_.hidden, layer.v, p_.kv_columns());
    const auto position = [&](int64_t i) { return c_.lengths[i / p_.block] + static_cast<int32_t>(i % p_.block); };
    finish_heads(&q, p_.heads, layer.q_norm, position);
    finish_heads(&k, p_.kv_heads, layer.k_norm, position);
    Rows a(q.size());
    for (int64_t unit = 0; unit < p_.batch * p_.kv_heads; ++unit)
      attend(layer, l, unit / p_.kv_heads, unit % p_.kv_heads, q, k, v, &a);
    return linear(a, p_.q_columns(), layer.o, p_.hidden);
  }

  // The query heads of one sequence that share kv head n: rows (t, query head).
  void attend(const DraftLayer& layer, int64_t l, int64_t b, int64_t n, const Rows& q, const Rows& k, const Rows& v,
              Rows* a) const {
    const int64_t d = p_.head_dim, per = p_.per_kv(), rows = p_.block * per, slots = p_.slots[l];
    const auto at = [&](int64_t i) {  // of row i in q and a
      return ((b * p_.block + i / per) * p_.heads + n * per + i % per) * d;
    };
    Rows queries(rows * kChunkKeys);
    for (int64_t i = 0; i < rows; ++i) std::copy(&q[at(i)], &q[at(i)] + d, &queries[i * kChunkKeys]);
    struct Part {
      std::vector<float> largest, sums;
    };
    std::vector<Part> parts;
    for (int64_t chunk = 0; chunk < p_.chunks(l); ++chunk) {
      const bool own = chunk == p_.chunks(l) - 1;
      const int64_t begin = own ? 0 : chunk * kChunkKeys;
      const int64_t keys = own ? p_.block : std::min<int64_t>(kChunkKeys, slots - begin);
      const auto key_at = [&](int64_t j) {
        return (b * (own ? p_.block : slots) + begin + j) * p_.kv_columns() + n * d;
      };
      // Keys as rows, values and a one as columns, filled up with zeros.
      Rows keys16(keys * kChunkKeys), values((d + 1) * kChunkKeys);
      for (int64_t j = 0; j < keys; ++j) {
        const uint16_t* key = (own ? k.data() : layer.ring_k) + key_at(j);
        const uint16_t* value = (own ? v.data() : layer.ring_v) + key_at(j);
        std::copy(key, key + d, &keys16[j * kChunkKeys]);
        for (int64_t e = 0; e < d; ++e) values[e * kChunkKeys + j] = value[e];
        values[d * kChunkKeys + j] = to_bf16(1.0f);
      }
      std::vector<float> scores = wide_gemm(queries, kChunkKeys, keys16.data(), keys);
      const auto seen = [&](int64_t i, int64_t j) {
        if (own) return true;
        const int64_t there = layer.ring_position[b * slots + begin + j], newest = c_.lengths[b];
        return there >= 0 && there < newest && (!p_.window[l] || newest + i / per - there < p_.window[l]);
      };
      Part part{std::vector<float>(rows, -inf32()), {}};
      Rows weights(rows * kChunkKeys);
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < keys; ++j) {
          scores[i * keys + j] = scores[i * keys + j] * p_.score_scale;
          if (seen(i, j)) part.largest[i] = larger(part.largest[i], scores[i * keys + j]);
        }
        for (int64_t j = 0; j < keys; ++j)
          if (seen(i, j)) weights[i * kChunkKeys + j] = to_bf16(exp1(scores[i * keys + j] - part.largest[i]));
      }
      part.sums = wide_gemm(weights, kChunkKeys, values.data(), d + 1);
      parts.push_back(std::move(part));
    }
    for (int64_t i = 0; i < rows; ++i) {
      float most = -inf32();
      for (const Part& part : parts) most = larger(most, part.largest[i]);
      std::vector<float> total(d + 1);
      for (const Part& part : parts) {
        const float scale = exp1(part.largest[i] - most);
        for (int64_t e = 0; e <= d; ++e) total[e] = fma1(scale, part.sums[i * (d + 1) + e], total[e]);
      }
      for (int64_t e = 0; e < d; ++e) (*a)[at(i) + e] = to_bf16(total[e] / total[d]);
    }
  }

  // From the normalised rows [rows, H].
  void propose(const Rows& x) const {
    const int64_t places = p_.places(), h = p_.hidden, count = p_.top_k;
    Rows hidden;
    for (int64_t b = 0; b < p_.batch; ++b)
      hidden.insert(hidden.end(), &x[(b * p_.block + 1) * h], &x[(b * p_.block + 1) * h] + places * h);
    const std::vector<float> logits = wide_gemm(hidden, h, c_.head, p_.vocab);
    const Rows gate = p_.is_v2() ? linear(hidden, h, c_.selector, p_.rank) : Rows();
    std::vector<int32_t> ids(p_.batch * places * count);
    parallel_for(p_.batch * places, [&](int64_t i) { choose(&logits[i * p_.vocab], &ids[i * count]); });
    const int64_t pair_rows = p_.pair_rows();
    std::vector<float> log_probs(p_.batch * places * pair_rows * count);
    parallel_for(p_.batch * places, [&](int64_t i) {
      float* out = &log_probs[i * pair_rows * count];
      if (p_.is_v2())
        pair_log_probs(&logits[i * p_.vocab], &gate[i * p_.rank], i % places ? &ids[(i - 1) * count] : nullptr,
                       c_.token[i / places], &ids[i * count], out);
      else
        marginal_log_probs(&logits[i * p_.vocab], &ids[i * count], out);
    });
    for (int64_t b = 0; b < p_.batch; ++b)
      best_first(c_, b, &ids[b * places * count], &log_probs[b * places * pair_rows * count]);
  }

  void choose(const float* logits, int32_t* ids) const {
    std::vector<uint64_t> keys(p_.vocab);
    for (int64_t v = 0; v < p_.vocab; ++v) keys[v] = candidate_key(logits[v], v);
    std::partial_sort(keys.begin(), keys.begin() + p_.top_k, keys.end(), std::greater<uint64_t>());
    for (int64_t k = 0; k < p_.top_k; ++k) ids[k] = candidate_id(keys[k]);
  }

  float logit(float z) const { return draft_logit(z, p_.multiplier, p_.cap); }

  void marginal_log_probs(const float* logits, const int32_t* ids, float* out) const {
    std::vector<float> all(p_.vocab);
    for (int64_t v = 0; v < p_.vocab; ++v) all[v] = logit(logits[v]);
    for (int64_t k = 0; k < p_.top_k; ++k) out[k] = log_prob_row(all.data(), p_.vocab, ids[k]);
  }

  // before: the candidates of the place before; null: the newest token only.
  void pair_log_probs(const float* logits, const uint16_t* gate, const int32_t* before, int32_t newest,
                      const int32_t* ids, float* out) const {
    const int64_t count = p_.top_k;
    std::vector<float> a(p_.rank);
    for (int64_t i = 0; i < count; ++i, out += count) {
      const uint16_t* row = c_.predecessor + (before ? before[i] : newest) * p_.rank;
      for (int64_t r = 0; r < p_.rank; ++r) a[r] = from_bf16(row[r]) * from_bf16(gate[r]);
      for (int64_t k = 0; k < count; ++k)
        out[k] = logit(logits[ids[k]]) + lanes(p_.rank, a.data(), c_.successor + ids[k] * p_.rank);
      log_softmax(count, out);
    }
  }

  static void log_softmax(int64_t n, float* x) {
    float most = -inf32(), total = 0.0f;
    for (int64_t k = 0; k < n; ++k) most = larger(most, x[k]);
    for (int64_t k = 0; k < n; ++k) total = total + exp1(x[k] - most);
    const float log_total = log1(total);
    for (int64_t k = 0; k < n; ++k) x[k] = (x[k] - most) - log_total;
  }

  const DraftCall& c_;
  const DraftPlan& p_;
  Rows x_;  // the residual stream, [rows, H]
};

}  // namespace

Status draft(Stream, const DraftCall& call) {
  const DraftPlan& p = call.plan;
  const auto wrong = [](const char* name, int64_t b, int64_t value, const std::string& allowed) {
    return Status{"draft: " + std::string(name) + "[" + std::to_string(b) + "] is " + std::to_string(value) +
                  ", allowed: " + allowed};
  };
  for (int64_t b = 0; b < p.batch; ++b) {
    if (p.width > 0 && (call.token[b] < 0 || call.token[b] >= p.vocab))
      return wrong("token", b, call.token[b], "0 to " + std::to_string(p.vocab - 1));
    if (call.count[b] < 0 || call.count[b] > p.fed)
      return wrong("count", b, call.count[b], "0 to " + std::to_string(p.fed));
    if (call.count[b] > 0 && call.first[b] < 0) return wrong("first position", b, call.first[b], "0 or more");
  }
  Draft(call).run();
  return {};
}

}  // namespace muse
