// What lies between the GEMMs of a draft: norms, convolutions and residual additions, heads, the rings.
#pragma once

#include "ffi/decode/cuda/norms.cuh"
#include "ffi/draft/cuda/shared.cuh"

namespace muse {

// What a norm sees: the projected features, the block's first rows, or the stream behind a sublayer.
enum class After { kFeatures, kNothing, kAttention, kMlp };

class DraftRows : public DraftPhases {
 public:
  using DraftPhases::DraftPhases;

  // Features into the order of an operand.
  __device__ void begin() {
    const int inner = static_cast<int>(p_.taps) * hidden(), fed = static_cast<int>(p_.batch * p_.fed);
    for (int64_t i = thread(); i < int64_t{fed} * inner / 8; i += threads()) {
      const int row = static_cast<int>(i / (inner / 8)), k = static_cast<int>(i % (inner / 8)) * 8;
      store_operand(s_.offsets.features, row, k, inner, __ldg(reinterpret_cast<const uint4*>(c_.features) + i));
    }
  }

  // x += the last sublayer's output, convolved, then the norm of the next sublayer, or that of the head, which sees
  // some rows only. A block takes a segment of a row. Who norms a row waits for the squares of all its segments, which
  // come before: a row has eight blocks (draft() asks for as many), and these take rows in the same order.
  __device__ void norm_rows(After after) {
    const bool context = after == After::kFeatures, last = after == After::kMlp && l() + 1 == p_.layers;
    const int n = after == After::kNothing ? 0 : 2 * l() + (after == After::kMlp ? 2 : 1);  // the next sublayer
    const uint16_t* weight = context                      ? c_.hidden_norm
                             : last                       ? c_.norm
                             : after == After::kAttention ? layer().post_norm
                                                          : c_.layer[n / 2].input_norm;
    const int h = hidden(), length = h / kSegments;
    const int64_t rows = context ? p_.batch * p_.fed : p_.rows();
    auto* sums = at<uint32_t>(context ? s_.offsets.context_sums : s_.offsets.row_sums.of(n));
    auto* x = reinterpret_cast<uint16_t*>(s_.region);
    for (int unit = block(); unit < rows * kSegments; unit += blocks()) {
      const int i = unit / kSegments, segment = unit % kSegments, first = segment * length;
      const auto gain = [&](int k) {
        return __ldg(reinterpret_cast<const uint4*>(weight + first + min(k, length - 8)));
      };
      uint4 w = gain(threadIdx.x * 8);  // on its way meanwhile
#pragma unroll 1
      for (int k = threadIdx.x * 8; k < length; k += kThreads * 8)
        *reinterpret_cast<uint4*>(x + k) = stream(after, i, first + k);
      sync_block();
      if (threadIdx.x < 32) {
        const float sum = sum_of_squares(x, length);
        if (lane() == 0) store_word(sums + unit, bit_cast<uint32_t>(sum));
      }
      const float r = inverse_rms(wait_squares(sums + i * kSegments), h, p_.eps);
      const int t = i % static_cast<int>(p_.block), places = static_cast<int>(p_.places());
      const int row = last ? i / static_cast<int>(p_.block) * places + t - 1 : i;
      if (!last || (t >= 1 && t <= places)) {
#pragma unroll 1
        for (int k = threadIdx.x * 8; k < length; k += kThreads * 8) {
          if (k >= kThreads * 8) w = gain(k);
          const uint4 y = eight([&](int j, const uint4& value,
                                    const uint4& gain) { return draft_norm(element(value, j), r, element(gain, j)); },
                                *reinterpret_cast<const uint4*>(x + k), w);
          store_operand(context ? s_.offsets.context : s_.offsets.normed.of(n), row, first + k, h, y);
        }
      }
      sync_block();  // the region may be written again
    }
  }

  // A sublayer's input between norm and GEMM.
  __device__ void convolve_input(bool mlp) {
    const int n = 2 * l() + mlp, h = hidden();
    const Taps before = taps(n, 0);
    const auto* z = at<uint16_t>(s_.offsets.normed.of(n));
    for (int i = thread(); i < p_.rows() * h / 8; i += threads()) {
      const int row = i / (h / 8), k = i % (h / 8) * 8;
      const auto words = [&](int row) {
        const auto* from = reinterpret_cast<const uint32_t*>(z + draft_operand_at(row, k, h));
        return uint4{load_word(from), load_word(from + 2), load_word(from + 4), load_word(from + 6)};
      };
      store_operand(s_.offsets.convolved.of(n), row, k, h, convolve(before, row, k, words));
    }
  }

  // Keys and values of the new tokens, of all layers, into the rings. Half a warp per row and head.
  __device__ void inject() {
    const int kv = static_cast<int>(p_.kv_heads), d = static_cast<int>(p_.head_dim), fed = static_cast<int>(p_.fed),
              layers = static_cast<int>(p_.layers), width = 2 * layers * kv * d;
    const int units = static_cast<int>(p_.batch) * fed * layers * kv;
#pragma unroll 1
    for (int both = warp(); 2 * both < units; both += warps()) {
      const int own = 2 * both + lane() / kLanes, unit = min(own, units - 1);
      const int head = unit % kv, l = unit / kv % layers, i = unit / (kv * layers), b = i / fed, t = i - b * fed;
      const int slots = static_cast<int>(p_.slots[l]), count = c_.count[b], position = c_.first[b] + t;
      const uint16_t* key =
          at<uint16_t>(s_.offsets.keys_values) + int64_t{i} * width + (2 * l * kv + head) * int64_t{d};
      const uint16_t* finished = finish_head(key, c_.layer[l].k_norm, position);
      if (__any_sync(~0u, s_.place.gave_up)) return;  // what was waited for is without sense
      // Of more tokens than the ring holds only the last count.
      if (own >= units || t >= count || t < count - slots || position < 0) continue;
      const int64_t row = int64_t{b} * slots + position % slots;
      for (int e = 2 * (lane() % kLanes); e < d; e += 2 * kLanes) {
        const uint32_t value = wait_word(key + kv * d + e);
        const auto finite = [](uint16_t low, uint16_t high) { return two_bf16(draft_finite(low), draft_finite(high)); };
        *reinterpret_cast<uint32_t*>(c_.layer[l].ring_k + (row * kv + head) * d + e) =
            finite(finished[e], finished[e + 1]);
        *reinterpret_cast<uint32_t*>(c_.layer[l].ring_v + (row * kv + head) * d + e) =
            finite(half_of(value, 0), half_of(value, 1));
      }
      if (head == 0 && lane() % kLanes == 0) c_.layer[l].ring_position[row] = position;
    }
  }

  // The block's queries and keys, normalised and turned. Half a warp each.
  __device__ void finish_heads() {
    const int q = static_cast<int>(p_.heads), all = q + static_cast<int>(p_.kv_heads),
              d = static_cast<int>(p_.head_dim), width = static_cast<int>(p_.q_columns() + 2 * p_.kv_columns());
    const int units = static_cast<int>(p_.rows()) * all;
#pragma unroll 1
    for (int both = warp(); 2 * both < units; both += warps()) {
      const int own = 2 * both + lane() / kLanes, unit = min(own, units - 1);
      const int i = unit / all, head = unit - i * all, b = i / static_cast<int>(p_.block);
      const uint16_t* x = at<uint16_t>(s_.offsets.projected.of(l())) + int64_t{i} * width + head * d;
      const uint16_t* finished = finish_head(x, head < q ? layer().q_norm : layer().k_norm,
                                             c_.lengths[b] + i - b * static_cast<int>(p_.block));
      if (own >= units) continue;
      uint16_t* to = at<uint16_t>(s_.offsets.heads.of(l())) + int64_t{unit} * d;
      for (int e = 2 * (lane() % kLanes); e < d; e += 2 * kLanes)
        store_word(to + e, two_bf16(finished[e], finished[e + 1]));
    }
  }

 private:
  template <typename F>
  __device__ static uint4 eight(F f, const uint4& a, const uint4& b) {
    uint32_t word[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) word[j] = two_bf16(f(2 * j, a, b), f(2 * j + 1, a, b));
    return {word[0], word[1], word[2], word[3]};
  }

  __device__ void store_operand(int64_t operand, int row, int k, int inner, const uint4& v) const {
    auto* to = reinterpret_cast<uint32_t*>(at<uint16_t>(operand) + draft_operand_at(row, k, inner));
    store_word(to, v.x), store_word(to + 2, v.y), store_word(to + 4, v.z),
        store_word(to + 6, v.w);  // a lane is 8 bytes
  }

  // Columns k to k + 7 of row i, whose norm it will be.
  __device__ __forceinline__ uint4 stream(After after, int i, int k) {
    const int h = hidden();
    if (after == After::kFeatures) {
      const uint16_t* from = at<uint16_t>(s_.offsets.fused) + int64_t{i} * h + k;
      uint4 v = load_words(from);
      wait_for(v, [from] { return load_words(from); });
      return v;
    }
    auto* x = reinterpret_cast<uint4*>(at<uint16_t>(s_.offsets.x) + int64_t{i} * h + k);
    uint4 v;
    if (after == After::kNothing) {
      const int b = i / static_cast<int>(p_.block);
      const int token = min(max(c_.token[b], 0), static_cast<int>(p_.vocab) - 1);  // the target refuses what is none
      const uint16_t* from = i % p_.block ? c_.mask : c_.embedding + int64_t{token} * h;
      v = __ldg(reinterpret_cast<const uint4*>(from + k));
    } else {
      const int n = 2 * l() + (after == After::kMlp);
      const uint4 own = __ldcg(x);  // this very thread has stored it
      const auto* z = at<uint16_t>(s_.offsets.branch.of(n));
      const uint4 branch = convolve(taps(n, 1), i, k, [&](int row) { return load_words(z + int64_t{row} * h + k); });
      v = eight([&](int j, const uint4& a, const uint4& b) { return draft_add(element(a, j), element(b, j)); }, own,
                branch);
    }
    *x = v;
    return v;
  }

  // One of a sublayer's two convolutions, of its input (side 0) or its output.
  struct Taps {
    const uint16_t *base, *coefficients;
    int size, groups;  // of columns; 0 for DFlash
  };
  __device__ Taps taps(int n, int side) const {
    const DraftConvolution& conv = n % 2 ? c_.layer[n / 2].mlp : c_.layer[n / 2].attention;
    const int size = static_cast<int>(p_.group), groups = size ? hidden() / size : 0;
    return {conv.base + side * 2 * hidden(), at<uint16_t>(s_.offsets.coefficients.of(n)) + side * 2 * groups, size,
            groups};
  }

  // What a convolution makes of the columns k to k + 7 of row i; as they are for DFlash. z(i): these columns as far as
  // they have come. A convolution's groups may be of any size.
  template <typename Rows>
  __device__ __forceinline__ uint4 convolve(const Taps& taps, int i, int k, Rows z) {
    const bool follows = taps.size && i % static_cast<int>(p_.block);
    uint4 own = z(i), last = follows ? z(i - 1) : uint4{0, 0, 0, 0};
    if (taps.size == 0) {
      wait_for(own, [&] { return z(i); });
      return own;
    }
    const uint4 base_own = __ldg(reinterpret_cast<const uint4*>(taps.base + k)),
                base_last = __ldg(reinterpret_cast<const uint4*>(taps.base + hidden() + k));
    const uint16_t* c = taps.coefficients + i * 4 * taps.groups;
    uint4 c_own, c_last;
    if (taps.size % 8) {
      c_own = uneven_coefficients(c, k, taps.size, 0), c_last = uneven_coefficients(c, k, taps.size, taps.groups);
    } else {  // all eight columns have the same
      const int at[2] = {k / taps.size, taps.groups + k / taps.size};
      uint32_t word[2] = {load_word(c + (at[0] & ~1)), load_word(c + (at[1] & ~1))};
      wait_for(word[0], [&] { return load_word(c + (at[0] & ~1)); });
      wait_for(word[1], [&] { return load_word(c + (at[1] & ~1)); });
      const uint32_t a = __byte_perm(word[0], 0, at[0] % 2 ? 0x3232 : 0x1010),
                     b = __byte_perm(word[1], 0, at[1] % 2 ? 0x3232 : 0x1010);
      c_own = {a, a, a, a}, c_last = {b, b, b, b};
    }
    wait_for(own, [&] { return z(i); });
    wait_for(last, [&] { return z(i - 1); });
    uint32_t word[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint16_t y[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int j = 2 * w + e;
        y[e] = draft_convolve(element(base_own, j), element(c_own, j), element(own, j), element(base_last, j),
                              element(c_last, j), element(last, j));
      }
      word[w] = two_bf16(y[0], y[1]);
    }
    return {word[0], word[1], word[2], word[3]};
  }

  // Of the columns k to k + 7; of a row's, the groups from `first` on.
  static __device__ __noinline__ uint4 uneven_coefficients(const uint16_t* c, int k, int size, int first) {
    DraftRows rows(draft_shared());
    const auto coefficient = [&](int k) {
      const int at = first + k / size;
      return half_of(rows.wait_word(c + (at & ~1)), at & 1);
    };
    uint4 v{};
#pragma unroll 1
    for (int j = 0; j < 8; j += 2) v = {v.y, v.z, v.w, two_bf16(coefficient(k + j), coefficient(k + j + 1))};
    return v;
  }

  // Of a segment in shared memory, by one warp.
  __device__ float sum_of_squares(const uint16_t* x, int length) const {
    float sum = 0.0f;
    if (lane() < kLanes) {
#pragma unroll 8
      for (int k = lane(); k < length; k += kLanes) {
        const float value = from_bf16(x[k]);
        sum = fma1(value, value, sum);
      }
    }
    return fold_warp(sum);
  }
  __device__ float wait_squares(const uint32_t* sums) {
    uint4 low = load_words(sums), high = load_words(sums + 4);
    wait_for(low, [sums] { return load_words(sums); });
    wait_for(high, [sums] { return load_words(sums + 4); });
    const float s[kSegments] = {bits32(low.x),  bits32(low.y),  bits32(low.z),  bits32(low.w),
                                bits32(high.x), bits32(high.y), bits32(high.z), bits32(high.w)};
    return tree8(s);
  }

  // One head by half a warp, into its own part of the region. All lanes come here.
  __device__ const uint16_t* finish_head(const uint16_t* x, const uint16_t* weight, int position) {
    const int d = static_cast<int>(p_.head_dim), half = d / 2, j = lane() % kLanes;
    auto* out = reinterpret_cast<uint16_t*>(s_.region) + threadIdx.x / kLanes * kMaxDraftHeadDim;
    __syncwarp();  // what the part held has been read
    static_assert(8 * kLanes >= kMaxDraftHeadDim, "eight elements a lane");
    if (8 * j < d) {
      uint4 v = load_words(x + 8 * j);
      wait_for(v, [&] { return load_words(x + 8 * j); });
      *reinterpret_cast<uint4*>(out + 8 * j) = v;
    }
    __syncwarp();
    float sum = 0.0f;
#pragma unroll 8
    for (int e = j; e < d; e += kLanes) {
      const float value = from_bf16(out[e]);
      sum = fma1(value, value, sum);
    }
    const float r = inverse_rms(fold_warp(sum), d, p_.eps);
    __syncwarp();  // all have read theirs
#pragma unroll 1
    for (int e = j; e < half; e += kLanes) {
      uint16_t low = draft_norm(out[e], r, __ldg(weight + e)),
               high = draft_norm(out[e + half], r, __ldg(weight + e + half));
      float cosine, sine;
      cos_sin(static_cast<float>(position) * __ldg(c_.frequencies + e), &cosine, &sine);
      draft_rotate(cosine, sine, &low, &high);
      out[e] = low, out[e + half] = high;
    }
    __syncwarp();
    return out;
  }
};

}  // namespace muse
