#include "races.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "simulator.h"

namespace simulator {

Races::Races(unsigned threads, const unsigned char* memory, size_t bytes)
    : memory_(memory), bytes_(bytes), clocks_(threads, Clock(threads, 0)), words_((bytes + 3) / 4) {
  for (unsigned i = 0; i < threads; ++i) clocks_[i][i] = 1;
}

void Races::access(unsigned thread, const void* p, unsigned bytes, bool write, const void* pc) {
  const size_t begin = static_cast<size_t>(static_cast<const unsigned char*>(p) - memory_);
  if (begin >= bytes_) return;  // not this block's shared memory
  const Clock& clock = clocks_[thread];
  for (size_t at = begin / 4; at <= (begin + bytes - 1) / 4; ++at) {
    uint8_t mask = 0;
    for (size_t b = 4 * at; b < 4 * at + 4; ++b) mask |= (b >= begin && b < begin + bytes) << b % 4;
    const Access own{pc, clock[thread], static_cast<uint16_t>(thread), mask, write};
    Access* place = nullptr;
    for (Access& old : words_[at].last) {
      const bool before = old.bytes == 0 || old.thread == thread || old.time <= clock[old.thread];
      if (!before && (old.bytes & mask) && (old.write || write)) {
        fprintf(stderr, "simulator: race at byte %zu of shared memory: thread %u %s, thread %u %s before, unordered\n",
                4 * at, thread, write ? "writes" : "reads", old.thread, old.write ? "wrote" : "read");
        print_place("now", pc), print_place("before", old.pc);
        abort();
      }
      // Replaced: the thread's own access of this kind, or what every later access of this thread's followers is
      // behind.
      if (old.bytes == 0 || (old.thread == thread && old.write == write && old.bytes == mask)) place = &old;
    }
    Word& word = words_[at];
    if (!place)
      for (Access& old : word.last)
        if (old.time <= clock[old.thread] && (write || !old.write) && (old.bytes | mask) == mask) place = &old;
    if (!place) {
      std::move(word.last + 1, word.last + kKept, word.last);
      place = &word.last[kKept - 1];
    }
    *place = own;
  }
}

void Races::join(Clock& to, const Clock& from) {
  if (to.size() < from.size()) to.resize(from.size(), 0);
  for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}

void Races::release(unsigned thread, Clock& to) {
  join(to, clocks_[thread]);
  ++clocks_[thread][thread];
}

void Races::acquire(unsigned thread, const Clock& from) { join(clocks_[thread], from); }

}  // namespace simulator

// What the compiler calls at every access.
extern "C" {
#define HOOK(name, bytes, write) \
  void __tsan_##name##bytes(void* p) { simulator::accessed(p, bytes, write, __builtin_return_address(0)); }
#define HOOKS(bytes)                         \
  HOOK(read, bytes, false)                   \
  HOOK(write, bytes, true)                   \
  HOOK(unaligned_read, bytes, false)         \
  HOOK(unaligned_write, bytes, true)         \
  void __tsan_volatile_read##bytes(void*) {} \
  void __tsan_volatile_write##bytes(void*) {}
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_read_range(void* p, size_t n) {
  simulator::accessed(p, static_cast<unsigned>(n), false, __builtin_return_address(0));
}
void __tsan_write_range(void* p, size_t n) {
  simulator::accessed(p, static_cast<unsigned>(n), true, __builtin_return_address(0));
}

// Atomics: as they would be without it.
uint32_t __tsan_atomic32_load(const uint32_t* p, int) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
uint64_t __tsan_atomic64_load(const uint64_t* p, int) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
void __tsan_atomic32_store(uint32_t* p, uint32_t v, int) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); }
void __tsan_atomic64_store(uint64_t* p, uint64_t v, int) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); }
uint32_t __tsan_atomic32_fetch_add(uint32_t* p, uint32_t v, int) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
uint32_t __tsan_atomic32_fetch_or(uint32_t* p, uint32_t v, int) { return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST); }
bool __tsan_atomic32_compare_exchange_strong(uint32_t* p, uint32_t* expected, uint32_t v, int, int) {
  return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}
