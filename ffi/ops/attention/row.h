// Attention of one query head over 16-position blocks of K and V, and the gate after it (docs/numerics.md 7,
// Attention 5 to 8). A block is unpacked once and fed to all the query heads and rows that see it.
#pragma once

#include "ffi/numerics/host_tile.h"
#include "ffi/ops/attention/chunks.h"
#include "ffi/ops/rope/row.h"

namespace muse {

constexpr int kHeadBlocks = kHead / kBlock;

// `count` (1 to 16) positions, `stride` elements apart in k and v -> tiles; positions from count on are zeros.
// k_tiles[b] is 16 dims (of block b) x 16 keys, v_tiles[b] is 16 positions x 16 dims.
MUSE_FN void load_kv_block(const uint16_t* k, const uint16_t* v, int64_t stride, int count, ColumnTile* k_tiles,
                           ColumnTile* v_tiles) {
  for (int b = 0; b < kHeadBlocks; ++b) {
    for (int p = 0; p < kBlock; ++p)
      for (int d = 0; d < kBlock; ++d) {
        const int64_t at = p * stride + b * kBlock + d;
        k_tiles[b].bits[d][p] = p < count ? k[at] : uint16_t{0};
        v_tiles[b].bits[p][d] = p < count ? v[at] : uint16_t{0};
      }
    finish_tile(k_tiles[b]);
    finish_tile(v_tiles[b]);
  }
}

// The running state of one query head of one row: begin, then block in ascending order, then finish.
class AttentionRow {
 public:
  // q: 64 bf16; scale: fp32(qk_scale_factor / 8).
  MUSE_FN void begin(const uint16_t* q, float scale) {
    for (int b = 0; b < kHeadBlocks; ++b) load_row_block(q + b * kBlock, q_[b]);
    scale_ = scale;
    chunk_ = -1;
    clear(chunk_sums_);
    clear(super_);
    clear(total_);
  }

  // Positions block_start .. +15 (block_start % 16 == 0); bit i of visible: the row sees block_start + i. A block
  // without a visible position may be left out.
  MUSE_FN void block(int64_t block_start, const ColumnTile* k_tiles, const ColumnTile* v_tiles, uint32_t visible) {
    if (block_start / kChunk != chunk_) enter_chunk(block_start / kChunk);
    float score[kLanes];
    chain16(q_, k_tiles, kHeadBlocks, score);
    uint16_t p[kBlock];
    for (int i = 0; i < kBlock; ++i) p[i] = visible >> i & 1u ? to_bf16(exp1(score[i] * scale_)) : uint16_t{0};
    RowBlock row;
    load_row_block(p, row);
    for (int b = 0; b < kHeadBlocks; ++b)
      chain16_continue(&row, v_tiles + b, 1, chunk_sums_.numerator + b * kBlock, ordinary_[b]);
    chain_ones_continue(row, chunk_sums_.denominator, ordinary_[kHeadBlocks]);
  }

  // a: 64 bf16. A row that saw nothing is NaN.
  MUSE_FN void finish(uint16_t* a) {
    if (chunk_ >= 0) leave_chunk();
    add(total_, super_);
    for (int i = 0; i < kHead; ++i) a[i] = to_bf16(total_.numerator[i] / total_.denominator);
  }

 private:
  struct Sums {
    alignas(64) float numerator[kHead];
    float denominator;
  };

  MUSE_FN static void clear(Sums& s) {
    for (int i = 0; i < kHead; ++i) s.numerator[i] = 0.0f;
    s.denominator = 0.0f;
  }

  MUSE_FN static void add(Sums& to, const Sums& from) {
    for (int i = 0; i < kHead; ++i) to.numerator[i] = to.numerator[i] + from.numerator[i];
    to.denominator = to.denominator + from.denominator;
  }

  MUSE_FN void leave_chunk() {
    add(super_, chunk_sums_);
    clear(chunk_sums_);
  }

  MUSE_FN void enter_chunk(int64_t chunk) {
    if (chunk_ >= 0) {
      leave_chunk();
      if (chunk * kChunk / kSuperChunk != chunk_ * kChunk / kSuperChunk) {
        add(total_, super_);
        clear(super_);
      }
    }
    chunk_ = chunk;
    for (bool& o : ordinary_) o = true;
  }

  RowBlock q_[kHeadBlocks];
  Sums chunk_sums_, super_, total_;
  int64_t chunk_;
  float scale_;
  bool ordinary_[kHeadBlocks + 1];  // the chunk's five chains: four of numerators, one of the denominator
};

// o = R((a * r64) * sigmoid(u)) of one head.
MUSE_FN void attention_gate_head(const uint16_t* a, const uint16_t* u, float eps, uint16_t* o) {
  const float r = inverse_rms(lanes(kHead, a, a), kHead, eps);
  for (int i = 0; i < kHead; ++i) o[i] = to_bf16((from_bf16(a[i]) * r) * sigmoid(from_bf16(u[i])));
}

}  // namespace muse
