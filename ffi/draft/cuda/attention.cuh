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

  // Largest scores and sums of every chunk: whole ones of the rings first. What a ring has beyond them and the blocks'
  // own keys are few and sooner done: blocks that would otherwise have less to do take two of these each. A window of
  // 2048 with eight heads are 128 whole chunks for 132 blocks, and 16 others.
  __device__ void chunks() {
    const int whole = whole_chunks(), heads = static_cast<int>(p_.batch * p_.kv_heads), units = heads * whole;
    const int parts = ring_chunks() + 1 - whole, spare = (blocks() - units % blocks()) % blocks();
#pragma unroll 1
    for (int u = block(); u < units; u += blocks()) all_tiles(u / whole, u % whole);
#pragma unroll 1
    for (int n = 0; n < heads * parts; ++n) {
      const int owner = n < 2 * spare ? blocks() - spare + n % spare : (n - 2 * spare) % blocks();
      if (owner == block()) all_tiles(n % heads, whole + n / heads);
    }
  }

  // The block's first chunk into L2, while it still has to wait for the queries: a thread half of a key or value.
  __device__ void prefetch() {
    const int u = block(), whole = whole_chunks(), kv = static_cast<int>(p_.kv_heads);
    if (u >= static_cast<int>(p_.batch) * kv * whole) return;
    const int head = u / whole, key = (u - head * whole) * static_cast<int>(kChunkKeys) + threadIdx.x / 2;
    const int slots = static_cast<int>(p_.slots[l()]), d = static_cast<int>(p_.head_dim), b = head / kv;
    const int64_t at = ((int64_t{b} * slots + key) * kv + head - b * kv) * d + threadIdx.x % 2 * (d / 2);
    ptx::prefetch_l2(layer().ring_k + at), ptx::prefetch_l2(layer().ring_v + at);
  }

  // The chunks together, into the operand of o_proj. A warp for each row and query head.
  __device__ void combine() {
    const int d = static_cast<int>(p_.head_dim), q = static_cast<int>(p_.heads), per = static_cast<int>(p_.per_kv()),
              width = static_cast<int>(p_.block), n = static_cast<int>(p_.chunks(l())), stride = d + 2;
    for (int unit = warp(); unit < static_cast<int>(p_.rows()) * q; unit += warps()) {
      const int i = unit / q, head = unit - i * q, b = i / width;
      const int64_t first = (int64_t{b} * (q / per) + head / per) * n;
      const int row = (i - b * width) * per + head % per, rows = width * per;
      const float* parts = at<float>(partials()) + (first * rows + row) * stride;
      const int64_t step = int64_t{rows} * stride;
      float most = -inf32();
#pragma unroll 8
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
      auto* to = reinterpret_cast<uint32_t*>(at<uint16_t>(s_.offsets.attended.of(l())) +
                                             draft_operand_at(i, head * d + e, static_cast<int>(p_.q_columns())));
      if (lane() * 4 < d) store_word(to, two_bf16(a[0], a[1])), store_word(to + 2, two_bf16(a[2], a[3]));
    }
  }

 private:
  static constexpr int kColumns = 64, kFewKeys = 32;
  static constexpr int kTurn = 16, kTurnTiles = kTurn / 8;

  // A chunk by all warps; one copy of the code.
  static __device__ __noinline__ void all_tiles(int head, int chunk) {
    DraftAttention(draft_shared()).tiles(head, chunk);
  }
  __device__ __forceinline__ void tiles(int head, int chunk) {
    const bool own = chunk == ring_chunks();
    const int keys = own ? static_cast<int>(p_.block)
                         : min(static_cast<int>(kChunkKeys), static_cast<int>(p_.slots[l()] - chunk * kChunkKeys));
#pragma unroll 1
    for (int tile = 0; tile * 16 < static_cast<int>(p_.block * p_.per_kv()); tile += kWarps) {
      if (keys <= kFewKeys)
        attend<kFewKeys>(head, chunk, own, keys, tile + threadIdx.x / 32);
      else
        attend<kChunkKeys>(head, chunk, own, keys, tile + threadIdx.x / 32);
    }
  }

  __device__ int whole_chunks() const { return static_cast<int>(p_.slots[l()] / kChunkKeys); }
  // A sequence's chunks but for the block's own keys.
  __device__ int ring_chunks() const {
    return (static_cast<int>(p_.slots[l()]) + kChunkKeys - 1) / static_cast<int>(kChunkKeys);
  }
  // Of queries and keys as finish_heads() leaves them, and of what else was projected.
  __device__ int heads_width() const { return static_cast<int>(p_.q_columns() + p_.kv_columns()); }
  __device__ int projected_width() const { return static_cast<int>(p_.q_columns() + 2 * p_.kv_columns()); }
  __device__ int64_t partials() const { return s_.offsets.partials.of(l() % 2); }

  // Chunk `chunk` of kv head `head` of all sequences' for tile `tile` of 16 rows (t, query head), which may not exist.
  //
  // Every loop over keys goes on in steps of 16 and turns the arrays by as much, so that it stands in the code once:
  // fetched anew in every layer, straight code for all keys takes longer than what it does.
  template <int kKeys>
  __device__ void attend(int head, int chunk, bool own, int keys, int tile) {
    constexpr int kStaged = (kKeys * 8 + kThreads - 1) / kThreads;
    const int d = static_cast<int>(p_.head_dim), width = static_cast<int>(p_.block),
              per = static_cast<int>(p_.per_kv()), kv = static_cast<int>(p_.kv_heads);
    const int slots = static_cast<int>(p_.slots[l()]), rows = width * per, g = lane() / 4, t = lane() % 4;
    const DraftLayer& layer = this->layer();
    const int b = head / kv, n = head - b * kv;
    const bool exists = tile * 16 < rows;
    const int begin = own ? 0 : chunk * static_cast<int>(kChunkKeys);
    // The rows g and g + 8 of the tile, or the last that exist.
    int row[2];
    row[0] = min(tile * 16 + g, rows - 1), row[1] = min(tile * 16 + g + 8, rows - 1);

    // Half of the columns of keys or values, on their way while the half before is worked on: a thread's part of them.
    const int first_key = threadIdx.x / 8, first_column = threadIdx.x % 8 * 8;
    const int64_t at_first = ((int64_t{b} * slots + begin + first_key) * kv + n) * d + first_column;
    constexpr int kKeyStep = kThreads / 8;
    uint4 next[kStaged];
    const auto fetch = [&](bool value, int half) {
      const bool inside = half * kColumns + first_column < d;
      const uint16_t* from = own ? own_part(b, n, value, first_key, half * kColumns + first_column)
                                 : (value ? layer.ring_v : layer.ring_k) + at_first + half * kColumns;
      const int stride = kKeyStep * (!own ? kv * d : value ? projected_width() : heads_width());
#pragma unroll
      for (int i = 0; i < kStaged; ++i)
        next[i] = inside && first_key + i * kKeyStep < keys ? load_words(from + i * stride) : uint4{0, 0, 0, 0};
    };
    if (own) wait_own(b, n, first_key, first_column, kKeyStep);
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
    uint32_t weights[kKeys / 16][4];
    float largest[2], denominator[4];
    {
      float s[kKeys / 8][4] = {};
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
    float* parts = at<float>(partials()) + int64_t{head * (ring_chunks() + 1) + chunk} * rows * (d + 2);
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
        constexpr int kKeyPairs = (kKeys + 31) / 32;  // of blocks
        uint32_t v[kKeyPairs][4];
#pragma unroll
        for (int two = 0; two < kKeyPairs; ++two)
          ptx::ldmatrix_x4_trans(v[two], base + tile_offset(two * 32 + lane(), tile8));
        float sum[4];
        product(weights, [&](int i) { return v[i / 4][i % 4]; }, sum);
        const int column = half * kColumns + tile8 * 8 + 2 * t;
        store(0, column, sum[0], sum[1]), store(1, column, sum[2], sum[3]);
      }
    }
  }

  // Of the block's own keys or values, row `key` of sequence b and kv head n from a column on.
  __device__ const uint16_t* own_part(int b, int n, bool value, int key, int column) const {
    const int64_t row = b * static_cast<int>(p_.block) + key;
    const uint16_t* from = value ? at<uint16_t>(s_.offsets.projected.of(l())) + row * projected_width() + heads_width()
                                 : at<uint16_t>(s_.offsets.heads.of(l())) + row * heads_width() + p_.q_columns();
    return from + n * static_cast<int>(p_.head_dim) + column;
  }
  // Until all is there that a thread will fetch of them.
  __device__ void wait_own(int b, int n, int first_key, int first_column, int step) {
    const auto look = [&] {
      bool there = true;
#pragma unroll 1
      for (int key = first_key; key < p_.block; key += step)
#pragma unroll
        for (int part = 0; part < 2 * kMaxDraftHeadDim / kColumns; ++part)
          if (const int column = part / 2 * kColumns + first_column; column < p_.head_dim)
            there = is_set(load_words(own_part(b, n, part % 2, key, column))) && there;
      return there ? -1 : 0;
    };
    wait_until_there(look);
  }

  // Four blocks of 16 columns of the queries, as A operands, as soon as they are there.
  __device__ void load_queries(int b, int n, int first, const int (&row)[2], uint32_t (&q)[4][4]) {
    const int d = static_cast<int>(p_.head_dim), per = static_cast<int>(p_.per_kv());
    const uint16_t* from[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      from[r] = at<uint16_t>(s_.offsets.heads.of(l())) +
                int64_t{b * static_cast<int>(p_.block) + row[r] / per} * heads_width() + (n * per + row[r] % per) * d;
    const auto look = [&] {
      bool there = true;
#pragma unroll
      for (int block = 0; block < 4; ++block)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int column = first + block * 16 + j / 2 * 8;
          q[block][j] = column < d ? load_word(from[j % 2] + column) : 0u;
        }
#pragma unroll
      for (int block = 0; block < 4; ++block)
#pragma unroll
        for (int j = 0; j < 4; ++j) there = there && is_set(q[block][j]);
      return there ? -1 : 0;
    };
    wait_until_there(look);
    __syncwarp();
  }

  // s = or += the products with half of the columns.
  template <int kTiles>
  __device__ void score(uint32_t base, int turns, const uint32_t (&q)[4][4], bool first, float (&s)[kTiles][4]) const {
#pragma unroll 1
    for (int step = 0; step < kTiles / kTurnTiles; ++step) {
      if (step < turns) {
#pragma unroll
        for (int i = 0; i < kTurnTiles; ++i) {
          __syncwarp();  // the compiler would bring several tiles first, and spill
          const int key = step * kTurn + i * 8 + (lane() & 7);
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
  template <int kTiles>
  __device__ void weigh(int turns, const int (&oldest)[2], float (&s)[kTiles][4], uint32_t (&weights)[kTiles / 2][4],
                        float (&largest)[2]) const {
    constexpr int kInTurn = 4 * kTurnTiles;
    const int t = lane() % 4;
    largest[0] = largest[1] = -inf32();
    uint64_t seen = 0;  // bit 4 tile + j
#pragma unroll 1
    for (int step = 0; step < kTiles / kTurnTiles; ++step) {
      uint64_t here = 0;
      if (step < turns) {
#pragma unroll
        for (int i = 0; i < kTurnTiles; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            s[i][e] = s[i][e] * p_.score_scale;
            if (s_.position[step * kTurn + i * 8 + 2 * t + e % 2] < oldest[e / 2]) continue;
            here |= uint64_t{1} << (4 * i + e);
            largest[e / 2] = larger(largest[e / 2], s[i][e]);
          }
      }
      seen |= here << (kInTurn * step);
      turn<kTurnTiles>(s);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int step = 1; step < 4; step *= 2) largest[r] = larger(largest[r], __shfl_xor_sync(~0u, largest[r], step));
#pragma unroll 1
    for (int step = 0; step < kTiles / kTurnTiles; ++step, seen >>= kInTurn) {
#pragma unroll
      for (int i = 0; i < kTurnTiles; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          uint16_t two[2] = {0, 0};
          if (step < turns) {
#pragma unroll
            for (int j = 0; j < 2; ++j)
              if (seen >> (4 * i + 2 * r + j) & 1u) two[j] = to_bf16(exp1(s[i][2 * r + j] - largest[r]));
          }
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

  // Weights times a tile of eight columns: a segment for each block of 16 keys, of which a chunk has eight.
  template <int kBlocks, typename Operand>
  __device__ static __forceinline__ void product(const uint32_t (&weights)[kBlocks][4], Operand operand,
                                                 float (&sum)[4]) {
    float part[kSegments][4] = {};
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
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
