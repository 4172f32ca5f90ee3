// The host's fast form of the contract's GEMM: sixteen output columns at a time in SIMD, still bit-exact.
//
// Why it is exact. In a block whose products have exponents within +-96, every product of two bf16 numbers is an exact
// fp32 (16 significant bits), and multiplying it by 2^(25-e) is exact or far below 1, so converting it to an integer
// truncates it to a multiple of 2^(e-25), which is rule 2 of fsum16. Sixteen such integers stay below 2^31; with the
// accumulator's integer they are added exactly in fp64; clearing the low 29 bits of that sum truncates it to 24
// significant bits, rule 3. Blocks outside that range (also NaN and infinities) take fsum16 itself.
#pragma once

#include "fsum16.h"
#include "reduce.h"

namespace muse {

constexpr int kBlock = 16;

// Smallest and largest exponent of the non-zero elements of a 16-wide operand block; {0, 0} when all are zero.
struct ExponentRange {
  int16_t low, high;
};

MUSE_FN bool is_ordinary(ExponentRange a, ExponentRange b) { return a.low + b.low >= -96 && a.high + b.high <= 96; }

MUSE_FN void widen_range(uint16_t bits, int& low, int& high) {
  const int field = (bits >> 7) & 255;
  // A subnormal (field 0, fraction set) and an infinity or NaN (field 255) must fail is_ordinary.
  const int exponent = field == 0 || field == 255 ? ((bits & 0x7FFF) == 0 ? 0 : 10000) : field - 127;
  const bool zero = (bits & 0x7FFF) == 0;
  low = !zero && exponent < low ? exponent : low;
  high = !zero && exponent > high ? exponent : high;
}

MUSE_FN ExponentRange make_range(int low, int high) {
  return low > high ? ExponentRange{0, 0} : ExponentRange{static_cast<int16_t>(low), static_cast<int16_t>(high)};
}

// A row operand: raw bits, their fp32 values, and one range per block.
struct RowBlock {
  float value[kBlock];
  uint16_t bits[kBlock];
  ExponentRange range;
};

// A column operand: 16 (k) x 16 (columns).
struct ColumnTile {
  alignas(64) float value[kBlock][kLanes];
  uint16_t bits[kBlock][kLanes];
  ExponentRange range;
};

MUSE_FN void load_row_block(const uint16_t* x, RowBlock& out) {
  int low = 20000, high = -20000;
  for (int i = 0; i < kBlock; ++i) {
    out.bits[i] = x[i];
    out.value[i] = from_bf16(x[i]);
    widen_range(x[i], low, high);
  }
  out.range = make_range(low, high);
}

// Fills value and range once bits are set.
MUSE_FN void finish_tile(ColumnTile& tile) {
  int low = 20000, high = -20000;
  for (int k = 0; k < kBlock; ++k)
    for (int n = 0; n < kLanes; ++n) {
      tile.value[k][n] = from_bf16(tile.bits[k][n]);
      widen_range(tile.bits[k][n], low, high);
    }
  tile.range = make_range(low, high);
}

namespace host_tile_detail {

typedef float Float16 __attribute__((vector_size(64)));
typedef int32_t Int16 __attribute__((vector_size(64)));
typedef double Double16 __attribute__((vector_size(128)));
typedef int64_t Long16 __attribute__((vector_size(128)));

MUSE_FN Float16 power_part(Float16 x) { return (Float16)((Int16)x & 0x7F800000); }

MUSE_FN void fsum16_ordinary(const RowBlock& a, const ColumnTile& b, Float16& acc) {
  Float16 product[kBlock], power = power_part(acc);
  for (int k = 0; k < kBlock; ++k) {
    const Float16 w = *reinterpret_cast<const Float16*>(b.value[k]);
    const float x = a.value[k], x_power = bit_cast<float>(bit_cast<uint32_t>(x) & 0x7F800000u);
    product[k] = w * x;
    const Float16 p = power_part(w) * x_power;
    power = power > p ? power : p;
  }
  // All terms here are multiples of 2^-125, so an exponent below -100 may be raised to it without truncating anything.
  const Float16 least = Float16{} + 0x1p-100f;
  power = power > least ? power : least;
  const Float16 scale = (Float16)((279 << 23) - (Int16)power);  // 2^(25-e)
  Int16 sum = {};
  for (int k = 0; k < kBlock; ++k) sum += __builtin_convertvector(product[k] * scale, Int16);
  const Int16 acc_units = __builtin_convertvector(acc * scale, Int16);
  Double16 total = __builtin_convertvector(sum, Double16) + __builtin_convertvector(acc_units, Double16);
  total = (Double16)((Long16)total & ~int64_t{0x1FFFFFFF});
  acc = __builtin_convertvector(total * __builtin_convertvector(power * 0x1p-25f, Double16), Float16);
}

}  // namespace host_tile_detail

// Whether the fast form may continue from these accumulators: +0, or a magnitude from which the argument above holds.
MUSE_FN bool may_continue(const float* acc) {
  bool ordinary = true;
  for (int n = 0; n < kLanes; ++n) {
    const float a = abs32(acc[n]);
    ordinary = ordinary && ((a >= 0x1p-100f && a <= 0x1p96f) || bit_cast<uint32_t>(acc[n]) == 0);
  }
  return ordinary;
}

// Continues sixteen chains by `blocks` blocks: acc[n] takes a with column n of b. `ordinary` is the chains' memory from
// call to call, true at their start (acc all +0): whether the next block may take the fast form.
MUSE_FN void chain16_continue(const RowBlock* a, const ColumnTile* b, int64_t blocks, float* acc, bool& ordinary) {
  int64_t i = 0;
  while (i < blocks) {
    if (ordinary && is_ordinary(a[i].range, b[i].range)) {
      host_tile_detail::Float16 sum;
      memcpy(&sum, acc, sizeof(sum));
      do host_tile_detail::fsum16_ordinary(a[i], b[i], sum);
      while (++i < blocks && is_ordinary(a[i].range, b[i].range));
      memcpy(acc, &sum, sizeof(sum));
    } else {
      for (int n = 0; n < kLanes; ++n) acc[n] = fsum16(acc[n], a[i].bits, &b[i].bits[0][n], Operand::kBf16, kLanes);
      ordinary = may_continue(acc);
      ++i;
    }
  }
}

// out[n] = chain over `blocks` blocks of a with column n of b.
MUSE_FN void chain16(const RowBlock* a, const ColumnTile* b, int64_t blocks, float* out) {
  for (int n = 0; n < kLanes; ++n) out[n] = 0.0f;
  bool ordinary = true;
  chain16_continue(a, b, blocks, out, ordinary);
}

// Continues one chain by the block a with sixteen ones; `ordinary` as in chain16_continue.
MUSE_FN void chain_ones_continue(const RowBlock& a, float& acc, bool& ordinary) {
  if (!ordinary || !is_ordinary(a.range, ExponentRange{0, 0})) {
    uint16_t ones[kBlock];
    for (int i = 0; i < kBlock; ++i) ones[i] = 0x3F80;
    acc = fsum16(acc, a.bits, ones, Operand::kBf16);
    const float magnitude = abs32(acc);
    ordinary = (magnitude >= 0x1p-100f && magnitude <= 0x1p96f) || bit_cast<uint32_t>(acc) == 0;
    return;
  }
  // fsum16_ordinary with the sixteen products in the lanes instead of sixteen columns.
  int32_t power = bit_cast<int32_t>(acc) & 0x7F800000;
  power = power > (27 << 23) ? power : 27 << 23;  // 2^-100
  for (int i = 0; i < kBlock; ++i) {
    const int32_t p = bit_cast<int32_t>(a.value[i]) & 0x7F800000;
    power = power > p ? power : p;
  }
  const float scale = bit_cast<float>((279 << 23) - power);
  int32_t sum = 0;
  for (int i = 0; i < kBlock; ++i) sum += static_cast<int32_t>(a.value[i] * scale);
  double total = static_cast<double>(sum) + static_cast<double>(static_cast<int32_t>(acc * scale));
  total = bit_cast<double>(bit_cast<int64_t>(total) & ~int64_t{0x1FFFFFFF});
  acc = static_cast<float>(total * static_cast<double>(bit_cast<float>(power) * 0x1p-25f));
}

// One NVFP4 block of sixteen columns: code values and scales as fp32.
struct CodeTile {
  alignas(64) float value[kBlock][kLanes];
  alignas(64) float scale[kLanes];
};

struct CodeRow {
  float value[kBlock];
  float scale;
};

// out[n] = the W4A4 segment sum: exact block terms, one rounding each.
MUSE_FN void chain16_codes(const CodeRow* a, const CodeTile* b, int64_t blocks, float* out) {
  using host_tile_detail::Float16;
  Float16 acc = {};
  for (int64_t i = 0; i < blocks; ++i) {
    Float16 sum = {};  // multiples of 1/4 up to 576: exact in any order
    for (int k = 0; k < kBlock; ++k) sum += *reinterpret_cast<const Float16*>(b[i].value[k]) * a[i].value[k];
    // sum * (s_w * s_a) is exact, so this product and addition round once, in the addition.
    acc = acc + sum * (*reinterpret_cast<const Float16*>(b[i].scale) * a[i].scale);
  }
  memcpy(out, &acc, sizeof(acc));
}

}  // namespace muse
