// Attention of a draft's block. A unit is a chunk of 128 keys of one sequence and kv head for all rows and query heads
// that share them; keys and values pass through shared memory in halves of 64 columns. Every GEMM has an inner
// dimension of 128: eight blocks of 16, one for each of the contract's segments.
#pragma once

#include "ffi/device/ptx.cuh"
#include "ffi/draft/cuda/shared.cuh"

namespace muse {

class DraftAttention : public DraftPhases {
 public:
  using DraftPhases::DraftPhases;

  // Largest scores and sums of every chunk. The blocks' own keys, which are few, come last: sixteen chunks of eight
  // heads are 128 units, a round for 132 blocks.
  __device__ void chunks() {
    const int of_ring = ring_chunks(), heads = static_cast<int>(p_.batch * p_.kv_heads);
#pragma unroll 1
    for (int u = block(); u < heads * (of_ring + 1); u += blocks()) {
      const bool own = u >= heads * of_ring;
      const int head = own ? u - heads * of_ring : u / of_ring;
#pragma unroll 1
      for (int tile = 0; tile * 16 < static_cast<int>(p_.block * p_.per_kv()); tile += kWarps)
        chunk(head, own ? of_ring : u - head * of_ring, own, tile + threadIdx.x / 32);
    }
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
#pragma unroll 8
      for (int c = 0; c < n; ++c) most = larger(most, __ldcg(parts + c * step + d + 1));
      const int e = min(lane() * 4, d - 4);  // four columns a lane
      float total[4] = {}, weight = 0.0f;
#pragma unroll 4
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
      auto* to = reinterpret_cast<uint32_t*>(at<uint16_t>(s_.offsets.operand[0]) +
                                             draft_operand_at(i, head * d + e, static_cast<int>(p_.q_columns())));
      if (lane() * 4 < d) to[0] = two_bf16(a[0], a[1]), to[2] = two_bf16(a[2], a[3]);
    }
  }

 private:
  static constexpr int kStaged = kChunkKeys * 8 / kThreads;  // sixteen bytes each, of a half for one thread
  static constexpr int kColumns = 64, kKeyTiles = kChunkKeys / 8, kKeyBlocks = kChunkKeys / 16;
  static constexpr int kTurn = 16, kTurnTiles = kTurn / 8;

  // A sequence's chunks but for the block's own keys.
  __device__ int ring_chunks() const {
    return (static_cast<int>(p_.slots[l()]) + kChunkKeys - 1) / static_cast<int>(kChunkKeys);
  }
  __device__ int projected_width() const { return static_cast<int>(p_.q_columns() + 2 * p_.kv_columns()); }

  // Chunk `chunk` of kv head `head` of all sequences' for tile `tile` of 16 rows (t, query head), which may not exist.
  //
  // Every loop over keys goes on in steps of 16 and turns the arrays by as much, so that it stands in the code once:
  // fetched anew in every layer, straight code for all keys takes longer than what it does.
  __device__ void chunk(int head, int chunk, bool own, int tile) {
    const int d = static_cast<int>(p_.head_dim), width = static_cast<int>(p_.block),
              per = static_cast<int>(p_.per_kv()), kv = static_cast<int>(p_.kv_heads);
    const int slots = static_cast<int>(p_.slots[l()]), rows = width * per, g = lane() / 4, t = lane() % 4;
    const DraftLayer& layer = this->layer();
    const int b = head / kv, n = head - b * kv;
    const bool exists = tile * 16 < rows;
    const int begin = own ? 0 : chunk * kChunkKeys, keys = own ? width : min(kChunkKeys, slots - begin);
    // The rows g and g + 8 of the tile, or the last that exist.
    int row[2];
    row[0] = min(tile * 16 + g, rows - 1), row[1] = min(tile * 16 + g + 8, rows - 1);

    // Half of the columns of keys or values, on their way while the half before is worked on: a thread's part of them.
    const int first_key = threadIdx.x / 8, first_column = threadIdx.x % 8 * 8;
    const int64_t at_first = own ? int64_t{b * width + first_key} * projected_width() + p_.q_columns() + n * d
                                 : ((int64_t{b} * slots + begin + first_key) * kv + n) * d;
    const int stride = (own ? projected_width() : kv * d) * (kThreads / 8);
    uint4 next[kStaged];
    const auto fetch = [&](bool value, int half) {
      const uint16_t* from =
          own ? at<uint16_t>(s_.offsets.projected) + (value ? kv * d : 0) : (value ? layer.ring_v : layer.ring_k);
      from += at_first + half * kColumns + first_column;
      const bool inside = half * kColumns + first_column < d;
#pragma unroll
      for (int i = 0; i < kStaged; ++i)
        next[i] = inside && first_key + i * (kThreads / 8) < keys ? load_eight(from + i * stride) : uint4{0, 0, 0, 0};
    };
    const auto stage = [&] {
      sync_block();
#pragma unroll
      for (int i = 0; i < kStaged; ++i)
        *reinterpret_cast<uint4*>(s_.region + tile_offset(first_key + i * (kThreads / 8), first_column / 8)) = next[i];
      sync_block();
    };
    fetch(false, 0);
    // Positions of the keys: -1, no row sees it; of the block's own, every row does.
    const int newest = c_.lengths[b], window = static_cast<int>(p_.window[l()]);
    if (threadIdx.x < kChunkKeys) {
      const int key = threadIdx.x;
      int there = -1;
      if (key < keys) there = own ? INT32_MAX : __ldcg(layer.ring_position + int64_t{b} * slots + begin + key);
      s_.position[key] = own || there < newest ? there : -1;
    }

    const uint32_t base = ptx::shared_address(s_.region);
    const int halves = (d + kColumns - 1) / kColumns, turns = (keys + kTurn - 1) / kTurn;
    uint32_t weights[kKeyBlocks][4];
    float largest[2], denominator[4];
    {
      float s[kKeyTiles][4] = {};
#pragma unroll 1
      for (int half = 0; half < halves; ++half) {
        uint32_t q[4][4];
        load_queries(b, n, half * kColumns + 2 * t, row, q);
        stage();
        const bool last = half + 1 == halves;
        fetch(last, last ? 0 : half + 1);
        if (exists) score(base, turns, q, half == 0, s);
      }
      int oldest[2];  // the first position that the row sees
#pragma unroll
      for (int r = 0; r < 2; ++r) oldest[r] = own || window == 0 ? 0 : max(0, newest + row[r] / per - window + 1);
      if (exists) weigh(turns, oldest, s, weights, largest);
    }
    float* parts = at<float>(s_.offsets.partials) + int64_t{head * (ring_chunks() + 1) + chunk} * rows * (d + 2);
    const auto store = [&](int r, int column, float low, float high) {
      if (tile * 16 + g + 8 * r < rows)
        *reinterpret_cast<float2*>(parts + int64_t{row[r]} * (d + 2) + column) = {low, high};
    };
    product(weights, [](int) { return 0x3F803F80u; }, denominator);  // ones
    if (exists && t == 0) store(0, d, denominator[0], largest[0]), store(1, d, denominator[2], largest[1]);
#pragma unroll 1
    for (int half = 0; half < halves; ++half) {
      stage();
      if (half + 1 < halves) fetch(true, half + 1);
      if (!exists) continue;
#pragma unroll 1
      for (int tile8 = 0; tile8 < 8 && half * kColumns + tile8 * 8 < d; ++tile8) {
        uint32_t v[4][4];
#pragma unroll
        for (int two = 0; two < 4; ++two) ptx::ldmatrix_x4_trans(v[two], base + tile_offset(two * 32 + lane(), tile8));
        float sum[4];
        product(weights, [&](int i) { return v[i / 4][i % 4]; }, sum);
        const int column = half * kColumns + tile8 * 8 + 2 * t;
        store(0, column, sum[0], sum[1]), store(1, column, sum[2], sum[3]);
      }
    }
  }

  // Four blocks of 16 columns of the queries, as A operands.
  __device__ void load_queries(int b, int n, int first, const int (&row)[2], uint32_t (&q)[4][4]) const {
    const int d = static_cast<int>(p_.head_dim), per = static_cast<int>(p_.per_kv());
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint16_t* from = at<uint16_t>(s_.offsets.projected) +
                             int64_t{b * static_cast<int>(p_.block) + row[r] / per} * projected_width() +
                             (n * per + row[r] % per) * d;
#pragma unroll
      for (int block = 0; block < 4; ++block)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int column = first + block * 16 + 8 * j;
          q[block][2 * j + r] = column < d ? __ldcg(reinterpret_cast<const uint32_t*>(from + column)) : 0u;
        }
    }
  }

  // s = or += the products with half of the columns.
  __device__ void score(uint32_t base, int turns, const uint32_t (&q)[4][4], bool first,
                        float (&s)[kKeyTiles][4]) const {
#pragma unroll 1
    for (int i16 = 0; i16 < kChunkKeys / kTurn; ++i16) {
      if (i16 < turns) {
#pragma unroll
        for (int i = 0; i < kTurnTiles; ++i) {
          __syncwarp();  // the compiler would bring several tiles first, and spill
          const int key = i16 * kTurn + i * 8 + (lane() & 7);
          uint32_t k[2][4];
          ptx::ldmatrix_x4(k[0], base + tile_offset(key, lane() >> 3));
          ptx::ldmatrix_x4(k[1], base + tile_offset(key, (lane() >> 3) + 4));
          float r[4][4] = {};
#pragma unroll
          for (int block = 0; block < 4; ++block) {
            const uint32_t two[2] = {k[block / 2][block % 2 * 2], k[block / 2][block % 2 * 2 + 1]};
            ptx::mma_bf16(r[block], q[block], two);
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float sum = (r[0][j] + r[1][j]) + (r[2][j] + r[3][j]);
            s[i][j] = first ? sum : s[i][j] + sum;
          }
        }
      }
      turn<kTurnTiles>(s);
    }
  }

  // Scores of the keys that a row sees become weights relative to the largest of them.
  __device__ void weigh(int turns, const int (&oldest)[2], float (&s)[kKeyTiles][4], uint32_t (&weights)[kKeyBlocks][4],
                        float (&largest)[2]) const {
    constexpr int kInTurn = 4 * kTurnTiles;
    const int t = lane() % 4;
    largest[0] = largest[1] = -inf32();
    uint64_t seen = 0;  // bit 4 tile + j
#pragma unroll 1
    for (int i16 = 0; i16 < kChunkKeys / kTurn; ++i16) {
      uint64_t here = 0;
      if (i16 < turns) {
#pragma unroll
        for (int i = 0; i < kTurnTiles; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            s[i][e] = s[i][e] * p_.score_scale;
            if (s_.position[i16 * kTurn + i * 8 + 2 * t + e % 2] < oldest[e / 2]) continue;
            here |= uint64_t{1} << (4 * i + e);
            largest[e / 2] = larger(largest[e / 2], s[i][e]);
          }
      }
      seen |= here << (kInTurn * i16);
      turn<kTurnTiles>(s);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int step = 1; step < 4; step *= 2) largest[r] = larger(largest[r], __shfl_xor_sync(~0u, largest[r], step));
#pragma unroll 1
    for (int i16 = 0; i16 < kChunkKeys / kTurn; ++i16, seen >>= kInTurn) {
#pragma unroll
      for (int i = 0; i < kTurnTiles; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          uint16_t two[2];
#pragma unroll
          for (int j = 0; j < 2; ++j)
            two[j] = seen >> (4 * i + 2 * r + j) & 1u ? to_bf16(exp1(s[i][2 * r + j] - largest[r])) : uint16_t{0};
          weights[i / 2][i % 2 * 2 + r] = two_bf16(two[0], two[1]);
        }
      turn<kTurnTiles>(s);
      turn<kTurnTiles / 2>(weights);
    }
  }

  // The first kBy elements go behind the others.
  template <int kBy, typename T, int kCount>
  __device__ static __forceinline__ void turn(T (&x)[kCount][4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      T first[kBy];
#pragma unroll
      for (int i = 0; i < kBy; ++i) first[i] = x[i][j];
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i][j] = i + kBy < kCount ? x[(i + kBy) % kCount][j] : first[i + kBy - kCount];
    }
  }

  // Weights times a tile of eight columns: a segment for each block of 16 keys.
  template <typename Operand>
  __device__ static __forceinline__ void product(const uint32_t (&weights)[kKeyBlocks][4], Operand operand,
                                                 float (&sum)[4]) {
    float part[kSegments][4] = {};
#pragma unroll
    for (int block = 0; block < kKeyBlocks; ++block) {
      const uint32_t two[2] = {operand(2 * block), operand(2 * block + 1)};
      ptx::mma_bf16(part[block], weights[block], two);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float column[kSegments] = {part[0][j], part[1][j], part[2][j], part[3][j],
                                       part[4][j], part[5][j], part[6][j], part[7][j]};
      sum[j] = tree8(column);
    }
  }
};

}  // namespace muse
