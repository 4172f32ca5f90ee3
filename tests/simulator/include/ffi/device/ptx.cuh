// ffi/device/ptx.cuh on the simulator: the same functions with the same meaning.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>

#include "ffi/numerics/formats.h"
#include "ffi/numerics/fsum16.h"
#include "ffi/numerics/host_tile.h"

namespace muse::ptx {

// --- threads and time

inline int thread_index() { return static_cast<int>(threadIdx.x); }

inline uint64_t globaltimer() {
  simulator::look_again();
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
          .count());
}

template <int kIndex, int kThreads>
void bar_sync() {
  simulator::barrier(kIndex, kThreads);
}

inline void look_again() { simulator::look_again(); }
inline void opaque(int&) {}

// --- memory of the device and of its peers

template <typename T>
T load_relaxed_sys(const T* p) {
  const T v = __atomic_load_n(p, __ATOMIC_SEQ_CST);
  simulator::look_again();  // every wait loads
  return v;
}
inline void load_relaxed_gpu_v2(const uint64_t* p, uint64_t (&v)[2]) {
  v[0] = load_relaxed_sys(p), v[1] = load_relaxed_sys(p + 1);
}
inline void load_relaxed_sys_v2(const uint64_t* p, uint64_t (&v)[2]) { load_relaxed_gpu_v2(p, v); }
// Whole operands are loaded so: others get their turn when a wait looks at the time.
inline uint32_t load_relaxed_gpu(const uint32_t* p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
inline uint2 load_relaxed_gpu_v2(const uint32_t* p) { return {load_relaxed_gpu(p), load_relaxed_gpu(p + 1)}; }
inline uint4 load_relaxed_gpu_v4(const uint32_t* p) {
  return {load_relaxed_gpu(p), load_relaxed_gpu(p + 1), load_relaxed_gpu(p + 2), load_relaxed_gpu(p + 3)};
}
inline uint32_t load_acquire_gpu(const uint32_t* p) { return load_relaxed_sys(p); }
template <typename T>
void store_relaxed_sys(T* p, T v) {
  __atomic_store_n(p, v, __ATOMIC_SEQ_CST);
  simulator::moved();
}
inline void store_relaxed_gpu(uint32_t* p, uint32_t v) { store_relaxed_sys(p, v); }
inline void store_relaxed_gpu_v2(uint64_t* p, uint64_t first, uint64_t second) {
  store_relaxed_sys(p, first), store_relaxed_sys(p + 1, second);
}
inline void add_release_gpu(uint32_t* p) {
  __atomic_fetch_add(p, 1u, __ATOMIC_SEQ_CST);
  simulator::moved();
}
inline void add_relaxed_gpu(uint32_t* p) { add_release_gpu(p); }
inline void fence_acq_rel_gpu() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

inline void prefetch_l2(const void*) {}
inline void bulk_prefetch_l2(const void*, uint32_t) {}
inline uint64_t evict_first_policy() { return 0; }

// --- shared memory: asynchronous copies of 16 bytes into it

inline uint32_t shared_address(const void* p) { return simulator::shared_address(p); }
inline void copy16(uint32_t shared, const void* global, bool inside = true) {
  simulator::copy(simulator::shared_pointer(shared), inside ? global : nullptr, 16);
}
inline void copy16_l2_256(uint32_t shared, const void* global, bool inside, uint64_t) {
  copy16(shared, global, inside);
}
inline void commit_copies() { simulator::commit_copies(); }
template <int kPending>
void wait_copies() {
  simulator::wait_copies(kPending);
}
inline void wait_all_copies() { simulator::wait_copies(-1); }

// --- shared memory: mbarriers, and bulk copies that complete them

inline void mbarrier_init(uint64_t* barrier, uint32_t arrivals) { simulator::mbarrier_init(barrier, arrivals); }
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(uint64_t* barrier) { simulator::mbarrier_arrive(barrier, 0); }
inline void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) { simulator::mbarrier_arrive(barrier, bytes); }
inline bool mbarrier_test_wait(uint64_t* barrier, uint32_t parity) { return simulator::mbarrier_past(barrier, parity); }
inline bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity) {
  const bool past = simulator::mbarrier_past(barrier, parity);
  if (!past) simulator::look_again();
  return past;
}
inline void bulk_copy(void* shared, const void* global, uint32_t bytes, uint64_t* barrier, uint64_t) {
  simulator::bulk_copy(shared, global, bytes, barrier);
}

// --- shared memory: matrices

struct Matrices {
  uint32_t m[4];
};
// Lane's register i: elements (row, column) and (row, column + 1), or with row and column exchanged.
template <bool kTransposed>
void ldmatrix(uint32_t (&m)[4], uint32_t shared) {
  void* row = simulator::shared_pointer(shared);
  simulator::accessed(row, 16, false, __builtin_return_address(0));
  const auto out =
      simulator::meet<Matrices>("ldmatrix", row, [](const simulator::Exchange& in, simulator::Exchange& out) {
        for (int lane = 0; lane < 32; ++lane) {
          Matrices own;
          for (int i = 0; i < 4; ++i) {
            const auto element = [&](int row, int column) -> uint32_t {
              uint16_t bits;
              memcpy(&bits, static_cast<const unsigned char*>(simulator::at<void*>(in, 8 * i + row)) + 2 * column, 2);
              return bits;
            };
            const int a = lane / 4, b = lane % 4 * 2;
            own.m[i] = kTransposed ? element(b, a) | element(b + 1, a) << 16 : element(a, b) | element(a, b + 1) << 16;
          }
          simulator::put(out, lane, own);
        }
      });
  memcpy(m, out.m, sizeof(m));
}
inline void ldmatrix_x4(uint32_t (&m)[4], uint32_t shared) { ldmatrix<false>(m, shared); }
inline void ldmatrix_x4_trans(uint32_t (&m)[4], uint32_t shared) { ldmatrix<true>(m, shared); }

// --- arithmetic

struct MmaIn {
  float d[4];
  uint32_t a[4], b[2];
};
struct MmaOut {
  float d[4];
};

template <Operand kOperand>
void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  MmaIn own;
  memcpy(own.d, d, sizeof(d)), memcpy(own.a, a, sizeof(a)), memcpy(own.b, b, sizeof(b));
  const auto out = simulator::meet<MmaOut>("mma", own, [](const simulator::Exchange& in, simulator::Exchange& out) {
    uint16_t rows[16][16], columns[8][16];
    float sums[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const auto v = simulator::at<MmaIn>(in, lane);
      const int g = lane / 4, t = lane % 4;
      for (int half = 0; half < 2; ++half) {
        for (int j = 0; j < 4; ++j)
          rows[g + 8 * (j & 1)][2 * t + 8 * (j >> 1) + half] = static_cast<uint16_t>(v.a[j] >> 16 * half);
        for (int j = 0; j < 2; ++j) columns[g][2 * t + 8 * j + half] = static_cast<uint16_t>(v.b[j] >> 16 * half);
      }
      for (int j = 0; j < 4; ++j) sums[g + 8 * (j >> 1)][2 * t + (j & 1)] = v.d[j];
    }
    // Kernels multiply by zeros where nothing is: a finite sum then stays what it is.
    const auto is_zero = [](const uint16_t (&x)[16]) {
      return std::all_of(x, x + 16, [](uint16_t e) { return e == 0; });
    };
    const auto is_finite = [](const uint16_t (&x)[16]) { return std::all_of(x, x + 16, bf16_finite); };
    for (int n = 0; n < 8; ++n) {
      const bool zero = kOperand == Operand::kBf16 && is_zero(columns[n]);
      for (int i = 0; i < 16; ++i)
        if (!zero || sums[i][n] - sums[i][n] != 0.0f || sums[i][n] == 0.0f || !is_finite(rows[i]))
          sums[i][n] = fsum16(sums[i][n], rows[i], columns[n], kOperand);
    }
    for (int lane = 0; lane < 32; ++lane) {
      MmaOut own;
      for (int j = 0; j < 4; ++j) own.d[j] = sums[lane / 4 + 8 * (j >> 1)][lane % 4 * 2 + (j & 1)];
      simulator::put(out, lane, own);
    }
  });
  memcpy(d, out.d, sizeof(d));
}
inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { mma<Operand::kBf16>(d, a, b); }
inline void mma_fp16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { mma<Operand::kFp16>(d, a, b); }

inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> 4 * i & 15, byte = static_cast<uint32_t>(bytes >> (nibble & 7) * 8) & 0xFF;
    out |= (nibble & 8 ? (byte >> 7) * 0xFF : byte) << 8 * i;
  }
  return out;
}
inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  const auto half = [](uint32_t two, int which) { return from_bf16(static_cast<uint16_t>(two >> 16 * which)); };
  return static_cast<uint32_t>(to_bf16(half(a, 0) * half(b, 0))) |
         static_cast<uint32_t>(to_bf16(half(a, 1) * half(b, 1))) << 16;
}
inline uint32_t halves_from_e4m3x2(uint16_t two) {
  const auto half = [](uint16_t byte) {
    return uint32_t{bit_cast<uint16_t>(static_cast<_Float16>(from_e4m3(static_cast<uint8_t>(byte))))};
  };
  return half(two) | half(two >> 8) << 16;
}
inline float2 from_e4m3x2(uint16_t two) {
  return {from_e4m3(static_cast<uint8_t>(two)), from_e4m3(static_cast<uint8_t>(two >> 8))};
}

}  // namespace muse::ptx
