// The host's floating-point mode.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace muse {

// XLA's CPU threads flush subnormals; the contract keeps them. Saves, clears and restores the mode.
class IeeeMode {
 public:
#if defined(__x86_64__)
  IeeeMode() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~0x8040u); }  // flush-to-zero | denormals-are-zero
  ~IeeeMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  IeeeMode() {
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(saved_));
    __asm__ __volatile__("msr fpcr, %0" ::"r"(saved_ & ~(uint64_t{1} << 24)));
  }
  ~IeeeMode() { __asm__ __volatile__("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_;
#else
#error "muse-jax: say here how this processor's flush-to-zero mode is cleared"
#endif
  IeeeMode(const IeeeMode&) = delete;
  IeeeMode& operator=(const IeeeMode&) = delete;
};

}  // namespace muse
