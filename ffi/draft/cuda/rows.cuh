// What lies between the GEMMs of a draft: norms, convolutions and residual additions row by row, heads, the rings.
#pragma once

#include "ffi/decode/cuda/norms.cuh"
#include "ffi/draft/cuda/shared.cuh"

namespace muse {

// The sublayer before a norm.
enum class After { kNothing, kAttention, kMlp };

class DraftRows : public DraftPhases {
 public:
  using DraftPhases::DraftPhases;

  // Features into the order of an operand, embeddings into the stream.
  __device__ void begin() {
    const int h = hidden(), inner = static_cast<int>(p_.taps) * h, fed = static_cast<int>(p_.batch * p_.fed);
    for (int64_t i = thread(); i < int64_t{fed} * inner / 8; i += threads()) {
      const int row = static_cast<int>(i / (inner / 8)), k = static_cast<int>(i % (inner / 8)) * 8;
      store_operand(0, row, k, inner, __ldg(reinterpret_cast<const uint4*>(c_.features) + i));
    }
    if (p_.width == 0) return;
    for (int i = thread(); i < p_.rows() * h / 8; i += threads()) {
      const int row = i / (h / 8), b = row / static_cast<int>(p_.block), k = i % (h / 8);
      const int token = min(max(c_.token[b], 0), static_cast<int>(p_.vocab) - 1);  // the target refuses what is none
      const uint16_t* from = row % p_.block ? c_.mask : c_.embedding + int64_t{token} * h;
      at<uint4>(s_.offsets.x)[i] = __ldg(reinterpret_cast<const uint4*>(from) + k);
    }
  }

  // The normed features, operand of the layers' keys and values.
  __device__ void norm_features() {
    for (int i = block(); i < p_.batch * p_.fed; i += blocks()) {
      const uint16_t* row = at<uint16_t>(s_.offsets.branch) + i * hidden();
      auto* x = reinterpret_cast<uint16_t*>(s_.region);
      for (int k = threadIdx.x * 8; k < hidden(); k += kThreads * 8)
        *reinterpret_cast<uint4*>(x + k) = load_eight(row + k);
      norm(i, c_.hidden_norm, false);
    }
  }

  // x += the last sublayer's output, convolved, then the norm of the next sublayer, or that of the head, which sees
  // some rows only.
  __device__ void add_and_norm(After after) {
    const bool last = after == After::kMlp && l() + 1 == p_.layers;
    const Taps conv = taps(after == After::kAttention ? layer().attention : layer().mlp, 1);
    const uint16_t* weight = last                         ? c_.norm
                             : after == After::kAttention ? layer().post_norm
                                                          : c_.layer[l() + (after == After::kMlp)].input_norm;
    const int h = hidden();
    for (int i = block(); i < p_.rows(); i += blocks()) {
      uint16_t* stream = at<uint16_t>(s_.offsets.x) + i * h;
      auto* x = reinterpret_cast<uint16_t*>(s_.region);
#pragma unroll 1
      for (int first = threadIdx.x * 8; first < h; first += kAtOnce * kThreads * 8) {
        uint4 v[kAtOnce];
        Window y[kAtOnce];
#pragma unroll
        for (int e = 0; e < kAtOnce; ++e) {
          const int k = min(first + e * kThreads * 8, h - 8);
          v[e] = load_eight(stream + k);
          if (after != After::kNothing) y[e] = window(conv, at<uint16_t>(s_.offsets.branch), i, k);
        }
#pragma unroll 1  // the code once, the pieces turned past it
        for (int k = first; k < min(first + kAtOnce * kThreads * 8, h); k += kThreads * 8) {
          if (after != After::kNothing) {
            v[0] = eight(
                [&](int j, const uint4& own, const uint4& z) { return draft_add(element(own, j), element(z, j)); },
                v[0], convolved(conv, y[0]));
            *reinterpret_cast<uint4*>(stream + k) = v[0];
          }
          *reinterpret_cast<uint4*>(x + k) = v[0];
#pragma unroll
          for (int e = 0; e + 1 < kAtOnce; ++e) v[e] = v[e + 1], y[e] = y[e + 1];
        }
      }
      const int t = i % static_cast<int>(p_.block), places = static_cast<int>(p_.places());
      if (!last)
        norm(i, weight, p_.group != 0);
      else if (t >= 1 && t <= places)
        norm(i / static_cast<int>(p_.block) * places + t - 1, weight, false);
      else
        sync_block();
    }
  }

  // The sublayer's input between norm and GEMM.
  __device__ void convolve_input(bool mlp) {
    const Taps before = taps(mlp ? layer().mlp : layer().attention, 0);
    const int h = hidden();
    for (int i = thread(); i < p_.rows() * h / 8; i += threads()) {
      const int row = i / (h / 8), k = i % (h / 8) * 8;
      store_operand(0, row, k, h, convolved(before, window(before, at<uint16_t>(s_.offsets.h), row, k)));
    }
  }

  // Keys and values of the new tokens, of all layers, into the rings. A warp per row and head.
  __device__ void inject() {
    const int kv = static_cast<int>(p_.kv_heads), d = static_cast<int>(p_.head_dim), fed = static_cast<int>(p_.fed),
              layers = static_cast<int>(p_.layers), width = 2 * layers * kv * d;
    for (int unit = warp(); unit < static_cast<int>(p_.batch) * fed * layers * kv; unit += warps()) {
      const int head = unit % kv, l = unit / kv % layers, i = unit / (kv * layers), b = i / fed, t = i - b * fed;
      const int slots = static_cast<int>(p_.slots[l]), count = c_.count[b], position = c_.first[b] + t;
      // Of more tokens than the ring holds only the last count.
      if (t >= count || t < count - slots || position < 0) continue;
      const uint16_t* key = at<uint16_t>(s_.offsets.projected) + int64_t{i} * width + (2 * l * kv + head) * d;
      const int64_t row = int64_t{b} * slots + position % slots;
      uint16_t* finished = finish_head(key, c_.layer[l].k_norm, position);
      for (int e = lane(); e < d; e += 32) {
        c_.layer[l].ring_k[(row * kv + head) * d + e] = draft_finite(finished[e]);
        c_.layer[l].ring_v[(row * kv + head) * d + e] = draft_finite(__ldcg(key + kv * d + e));
      }
      if (head == 0 && lane() == 0) c_.layer[l].ring_position[row] = position;
      __syncwarp();
    }
  }

  // The block's queries and keys, normalised and turned in place.
  __device__ void finish_heads() {
    const int q = static_cast<int>(p_.heads), all = q + static_cast<int>(p_.kv_heads),
              d = static_cast<int>(p_.head_dim), width = static_cast<int>(p_.q_columns() + 2 * p_.kv_columns());
    for (int unit = warp(); unit < static_cast<int>(p_.rows()) * all; unit += warps()) {
      const int i = unit / all, head = unit - i * all, b = i / static_cast<int>(p_.block);
      uint16_t* x = at<uint16_t>(s_.offsets.projected) + int64_t{i} * width + head * d;
      const uint16_t* finished = finish_head(x, head < q ? layer().q_norm : layer().k_norm,
                                             c_.lengths[b] + i - b * static_cast<int>(p_.block));
      for (int e = lane(); e < d; e += 32) x[e] = finished[e];
      __syncwarp();
    }
  }

 private:
  static constexpr int kAtOnce = 2;  // pieces of a row that a thread has under way

  template <typename F>
  __device__ static uint4 eight(F f, const uint4& a, const uint4& b) {
    uint32_t word[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) word[j] = two_bf16(f(2 * j, a, b), f(2 * j + 1, a, b));
    return {word[0], word[1], word[2], word[3]};
  }

  __device__ void store_operand(int which, int row, int k, int inner, const uint4& v) const {
    auto* to = at<uint16_t>(s_.offsets.operand[which]);
    auto* at =
        reinterpret_cast<uint32_t*>(to + draft_operand_at(row, k, inner));  // of the first two; a lane is 8 bytes
    at[0] = v.x, at[2] = v.y, at[4] = v.z, at[6] = v.w;
  }

  // One of a sublayer's two convolutions, of its input (side 0) or its output.
  struct Taps {
    const uint16_t *base, *coefficients;
    int size, groups;  // of columns; 0 for DFlash
  };
  __device__ Taps taps(const DraftConvolution& conv, int side) const {
    const int size = static_cast<int>(p_.group), groups = size ? hidden() / size : 0;
    return {conv.base + side * 2 * hidden(), at<uint16_t>(s_.offsets.coefficients) + side * 2 * groups, size, groups};
  }

  // What a convolution makes the columns k to k + 7 of row i of z from. A convolution's groups may be of any size.
  struct Window {
    uint4 own, last, base_own, base_last, c_own, c_last;
  };
  __device__ Window window(const Taps& taps, const uint16_t* z, int i, int k) const {
    const int h = hidden();
    Window w{load_eight(z + i * h + k)};
    if (taps.size == 0) return w;
    if (i % static_cast<int>(p_.block)) w.last = load_eight(z + (i - 1) * h + k);
    w.base_own = __ldg(reinterpret_cast<const uint4*>(taps.base + k));
    w.base_last = __ldg(reinterpret_cast<const uint4*>(taps.base + h + k));
    const uint16_t* c = taps.coefficients + i * 4 * taps.groups;
    w.c_own = coefficients(c, k, taps.size), w.c_last = coefficients(c + taps.groups, k, taps.size);
    return w;
  }
  // As they are for DFlash.
  __device__ static uint4 convolved(const Taps& taps, const Window& w) {
    if (taps.size == 0) return w.own;
    return eight(
        [&](int j, const uint4& x, const uint4& before) {
          return draft_convolve(element(w.base_own, j), element(w.c_own, j), element(x, j), element(w.base_last, j),
                                element(w.c_last, j), element(before, j));
        },
        w.own, w.last);
  }

  // Of the columns k to k + 7, of the groups from c on.
  static __device__ uint4 coefficients(const uint16_t* c, int k, int size) {
    if (size % 8) return uneven_coefficients(c, k, size);
    const uint32_t one = __ldcg(c + k / size), two = one << 16 | one;
    return {two, two, two, two};
  }
  static __device__ __noinline__ uint4 uneven_coefficients(const uint16_t* c, int k, int size) {
    uint32_t word[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) word[j] = two_bf16(__ldcg(c + (k + 2 * j) / size), __ldcg(c + (k + 2 * j + 1) / size));
    return {word[0], word[1], word[2], word[3]};
  }

  // The row in the region, normed, as row i of operand 0; `keep`: and as row i of h.
  __device__ void norm(int i, const uint16_t* weight, bool keep) {
    const int h = hidden(), length = h / kSegments, lane16 = lane() % kLanes, segment = threadIdx.x / 32;
    const auto* x = reinterpret_cast<const uint16_t*>(s_.region);
    uint4 w[kAtOnce];
    const auto gains = [&](int first) {
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e)
        w[e] = __ldg(reinterpret_cast<const uint4*>(weight + min(first + e * kThreads * 8, h - 8)));
    };
    gains(min(static_cast<int>(threadIdx.x) * 8, h - 8));  // on their way while the squares are added
    sync_block();
    float sum = 0.0f;
    if (lane() < kLanes) {
#pragma unroll 8
      for (int k = lane16; k < length; k += kLanes) {
        const float value = from_bf16(x[segment * length + k]);
        sum = fma1(value, value, sum);
      }
    }
    sum = fold_warp(sum);
    if (lane() == 0) s_.partial[segment] = sum;
    sync_block();
    const float r = inverse_rms(tree8(s_.partial), h, p_.eps);
#pragma unroll 1
    for (int k = threadIdx.x * 8, e = 0; k < h; k += kThreads * 8, ++e) {
      if (e == kAtOnce) gains(k), e = 0;
      const uint4 y = eight([&](int j, const uint4& value,
                                const uint4& gain) { return draft_norm(element(value, j), r, element(gain, j)); },
                            *reinterpret_cast<const uint4*>(x + k), w[0]);
      if (keep) *reinterpret_cast<uint4*>(at<uint16_t>(s_.offsets.h) + i * h + k) = y;
      store_operand(0, i, k, h, y);
#pragma unroll
      for (int n = 0; n + 1 < kAtOnce; ++n) w[n] = w[n + 1];
    }
    sync_block();  // the region may be written again
  }

  // One head by a warp, into the warp's own part of the region.
  __device__ uint16_t* finish_head(const uint16_t* x, const uint16_t* weight, int position) {
    const int d = static_cast<int>(p_.head_dim), half = d / 2, j = lane() % kLanes;
    auto* out = reinterpret_cast<uint16_t*>(s_.region) + threadIdx.x / 32 * kMaxDraftHeadDim;
    float sum = 0.0f;
    for (int e = j; e < d; e += kLanes) {
      const float value = from_bf16(__ldcg(x + e));
      sum = fma1(value, value, sum);
    }
    const float r = inverse_rms(fold_warp(sum), d, p_.eps);
    for (int e = lane(); e < d; e += 32) out[e] = draft_norm(__ldcg(x + e), r, __ldg(weight + e));
    __syncwarp();
    for (int e = lane(); e < half; e += 32) {
      float cosine, sine;
      cos_sin(static_cast<float>(position) * __ldg(c_.frequencies + e), &cosine, &sine);
      draft_rotate(cosine, sine, out + e, out + e + half);
    }
    __syncwarp();
    return out;
  }
};

}  // namespace muse
