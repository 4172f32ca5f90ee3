// Attention of a draft's block. A unit is a chunk of 128 keys of one sequence and kv head for all rows and query heads
// that share them; keys and values pass through shared memory in halves of 64 columns. Every GEMM has an inner
// dimension of 128: eight blocks of 16, one for each of the contract's segments.
#pragma once

#include "ffi/draft/cuda/shared.cuh"
#include "ffi/numerics/mma.cuh"

namespace muse {

class DraftAttention : public DraftPhases {
 public:
  using DraftPhases::DraftPhases;

  // Largest scores and sums of every chunk.
  __device__ void chunks() {
    const int kv = static_cast<int>(p_.kv_heads), per_head = static_cast<int>(p_.chunks(l()));
    const int tiles = (static_cast<int>(p_.block * p_.per_kv()) + 15) / 16;
    for (int unit = block(); unit < static_cast<int>(p_.batch) * kv * per_head; unit += blocks())
      for (int tile = 0; tile < tiles; tile += kWarps)
        chunk(unit / (kv * per_head), unit / per_head % kv, unit % per_head, tile + threadIdx.x / 32, unit);
  }

  // The chunks together, into the operand of o_proj. A warp for each row and query head.
  __device__ void combine() {
    const int d = static_cast<int>(p_.head_dim), q = static_cast<int>(p_.heads), per = static_cast<int>(p_.per_kv()),
              width = static_cast<int>(p_.block), n = static_cast<int>(p_.chunks(l())), stride = d + 2;
    for (int unit = warp(); unit < static_cast<int>(p_.rows()) * q; unit += warps()) {
      const int i = unit / q, head = unit - i * q, b = i / width;
      const int64_t first = (int64_t{b} * (q / per) + head / per) * n;
      const int row = (i - b * width) * per + head % per, rows = width * per;
      const float* parts = at<float>(s_.offsets.partials) + (first * rows + row) * stride;
      const int64_t step = int64_t{rows} * stride;
      float most = -inf32();
      for (int c = 0; c < n; ++c) most = larger(most, __ldcg(parts + c * step + d + 1));
      const int e = min(lane() * 4, d - 4);  // four columns a lane
      float total[4] = {}, weight = 0.0f;
#pragma unroll 2
      for (int c = 0; c < n; ++c) {
        const float* part = parts + c * step;
        const float scale = exp1(__ldcg(part + d + 1) - most);
        weight = fma1(scale, __ldcg(part + d), weight);
        const float2 low = __ldcg(reinterpret_cast<const float2*>(part + e)),
                     high = __ldcg(reinterpret_cast<const float2*>(part + e + 2));
        total[0] = fma1(scale, low.x, total[0]), total[1] = fma1(scale, low.y, total[1]);
        total[2] = fma1(scale, high.x, total[2]), total[3] = fma1(scale, high.y, total[3]);
      }
      uint16_t a[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) a[j] = to_bf16(total[j] / weight);
      auto* to =
          at<uint16_t>(s_.offsets.operand[0]) + draft_operand_at(i, head * d + e, static_cast<int>(p_.q_columns()));
      if (lane() * 4 < d) *reinterpret_cast<uint2*>(to) = {two_bf16(a[0], a[1]), two_bf16(a[2], a[3])};
    }
  }

 private:
  static constexpr int kColumns = 64, kKeyTiles = kChunkKeys / 8, kKeyBlocks = kChunkKeys / 16;

  __device__ int projected_width() const { return static_cast<int>(p_.q_columns() + 2 * p_.kv_columns()); }

  // Chunk `chunk` of kv head n for tile `tile` of 16 rows (t, query head), which may not exist.
  __device__ void chunk(int b, int n, int chunk, int tile, int unit) {
    const int d = static_cast<int>(p_.head_dim), width = static_cast<int>(p_.block),
              per = static_cast<int>(p_.per_kv());
    const int slots = static_cast<int>(p_.slots[l()]), rows = width * per, g = lane() / 4, t = lane() % 4;
    const DraftLayer& layer = this->layer();
    const bool own = chunk == static_cast<int>(p_.chunks(l())) - 1, exists = tile * 16 < rows;
    const int begin = own ? 0 : chunk * kChunkKeys, keys = own ? width : min(kChunkKeys, slots - begin);
    // The rows g and g + 8 of the tile, or the last that exist.
    int row[2];
    row[0] = min(tile * 16 + g, rows - 1), row[1] = min(tile * 16 + g + 8, rows - 1);
    auto* staged = s_.region;
    const auto source = [&](bool value, int key) -> const uint16_t* {
      if (own) {
        const int at_column = static_cast<int>(p_.q_columns() + (value ? p_.kv_columns() : 0)) + n * d;
        return at<uint16_t>(s_.offsets.projected) + int64_t{b * width + key} * projected_width() + at_column;
      }
      const int64_t slot = int64_t{b} * slots + begin + key;
      return (value ? layer.ring_v : layer.ring_k) + (slot * static_cast<int>(p_.kv_heads) + n) * d;
    };
    const auto stage = [&](bool value, int half) {
      sync_block();
#pragma unroll 4
      for (int i = threadIdx.x; i < kChunkKeys * 8; i += kThreads) {
        const int key = i / 8, column = half * kColumns + i % 8 * 8;
        const bool inside = key < keys && column < d;
        *reinterpret_cast<uint4*>(staged + tile_offset(key, i % 8)) =
            inside ? load_eight(source(value, key) + column) : uint4{0, 0, 0, 0};
      }
      sync_block();
    };
    const uint32_t base = shared_address(staged);

    float s[kKeyTiles][4] = {};
#pragma unroll 1
    for (int half = 0; half * kColumns < d; ++half) {
      stage(false, half);
      if (!exists) continue;
      uint32_t q[4][4];
#pragma unroll
      for (int block = 0; block < 4; ++block)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int column = half * kColumns + block * 16 + 2 * t + 8 * (j >> 1), r = row[j & 1];
          q[block][j] =
              column < d ? __ldcg(reinterpret_cast<const uint32_t*>(at<uint16_t>(s_.offsets.projected) +
                                                                    int64_t{b * width + r / per} * projected_width() +
                                                                    (n * per + r % per) * d + column))
                         : 0u;
        }
#pragma unroll
      for (int tile8 = 0; tile8 < kKeyTiles; ++tile8) {
        __syncwarp();  // the compiler would bring several tiles first, and spill
        uint32_t k[2][4];
        load_matrices(k[0], base + tile_offset(tile8 * 8 + (lane() & 7), lane() >> 3));
        load_matrices(k[1], base + tile_offset(tile8 * 8 + (lane() & 7), (lane() >> 3) + 4));
        float r[4][4] = {};
#pragma unroll
        for (int block = 0; block < 4; ++block) {
          const uint32_t two[2] = {k[block / 2][block % 2 * 2], k[block / 2][block % 2 * 2 + 1]};
          mma_bf16(r[block], q[block], two);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float sum = (r[0][j] + r[1][j]) + (r[2][j] + r[3][j]);
          s[tile8][j] = half == 0 ? sum : s[tile8][j] + sum;
        }
      }
    }

    // Which keys each row sees; then weights relative to the largest score.
    float largest[2] = {-inf32(), -inf32()};
    uint64_t seen = 0;  // bit 4 tile + j
    if (exists) {
      const int newest = c_.lengths[b], window = static_cast<int>(p_.window[l()]);
#pragma unroll
      for (int tile8 = 0; tile8 < kKeyTiles; ++tile8) {
        __syncwarp();  // the compiler would bring all positions first
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int key = tile8 * 8 + 2 * t + j;
          const int there = own || key >= keys ? -1 : __ldcg(layer.ring_position + int64_t{b} * slots + begin + key);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int e = 2 * r + j;
            const bool visible =
                own ? key < keys
                    : there >= 0 && there < newest && (window == 0 || newest + row[r] / per - there < window);
            s[tile8][e] = s[tile8][e] * p_.score_scale;
            if (visible) {
              seen |= uint64_t{1} << (4 * tile8 + e);
              largest[r] = larger(largest[r], s[tile8][e]);
            }
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int step = 1; step < 4; step *= 2) largest[r] = larger(largest[r], __shfl_xor_sync(~0u, largest[r], step));
    uint32_t weights[kKeyBlocks][4];
#pragma unroll
    for (int tile8 = 0; tile8 < kKeyTiles; ++tile8) {
      __syncwarp();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint16_t two[2];
#pragma unroll
        for (int j = 0; j < 2; ++j)
          two[j] = seen >> (4 * tile8 + 2 * r + j) & 1u ? to_bf16(exp1(s[tile8][2 * r + j] - largest[r])) : uint16_t{0};
        weights[tile8 / 2][tile8 % 2 * 2 + r] = two_bf16(two[0], two[1]);
      }
    }

    float* parts = at<float>(s_.offsets.partials) + int64_t{unit} * rows * (d + 2);
    const auto product = [&](const auto& operand, float (&sum)[4]) {
      float part[kSegments][4] = {};
#pragma unroll
      for (int block = 0; block < kKeyBlocks; ++block) {
        const uint32_t two[2] = {operand(2 * block), operand(2 * block + 1)};
        mma_bf16(part[block], weights[block], two);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float column[kSegments] = {part[0][j], part[1][j], part[2][j], part[3][j],
                                         part[4][j], part[5][j], part[6][j], part[7][j]};
        sum[j] = tree8(column);
      }
    };
    const auto present = [&](int r) { return exists && tile * 16 + g + 8 * r < rows; };
    float denominator[4];
    product([](int) { return 0x3F803F80u; }, denominator);  // ones
    if (t == 0)
      for (int r = 0; r < 2; ++r)
        if (present(r))
          *reinterpret_cast<float2*>(parts + int64_t{row[r]} * (d + 2) + d) = {denominator[2 * r], largest[r]};
#pragma unroll 1
    for (int half = 0; half * kColumns < d; ++half) {
      stage(true, half);
      if (!exists) continue;
#pragma unroll 1
      for (int tile8 = 0; tile8 < 8 && half * kColumns + tile8 * 8 < d; ++tile8) {
        uint32_t v[4][4];
#pragma unroll
        for (int two = 0; two < 4; ++two)
          load_matrices_transposed(v[two], base + tile_offset(two * 32 + lane(), tile8));
        float sum[4];
        product([&](int i) { return v[i / 4][i % 4]; }, sum);
        const int column = half * kColumns + tile8 * 8 + 2 * t;
        for (int r = 0; r < 2; ++r)
          if (present(r))
            *reinterpret_cast<float2*>(parts + int64_t{row[r]} * (d + 2) + column) = {sum[2 * r], sum[2 * r + 1]};
      }
    }
  }
};

}  // namespace muse
