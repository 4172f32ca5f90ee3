// Races in a block's shared memory: two accesses of different threads, one of them a write, of which nothing says that
// the first has happened before the second. Found by vector clocks, whatever the order in which the threads ran.
//
// Kernels are compiled with -fsanitize=thread for this (MUSE_SIMULATOR=RACES), and races.cc takes ThreadSanitizer's
// place: its library knows neither fibers nor barriers. Barriers, __syncwarp, mbarriers and bulk copies order;
// shuffles, votes and atomics do not. Volatile accesses and atomics are not looked at.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace simulator {

class Races {
 public:
  using Clock = std::vector<uint32_t>;  // by thread

  Races(unsigned threads, const unsigned char* memory, size_t bytes);

  // An access of a thread; ends the process if it races. `pc`: where, for the message.
  void access(unsigned thread, const void* p, unsigned bytes, bool write, const void* pc);
  // What the thread did so far belongs to `to` (empty: to nothing yet).
  void release(unsigned thread, Clock& to);
  // What belongs to `from` has happened before what the thread does next.
  void acquire(unsigned thread, const Clock& from);
  static void join(Clock& to, const Clock& from);

 private:
  struct Access {
    const void* pc;
    uint32_t time;
    uint16_t thread;
    uint8_t bytes;  // of the word, as bits; 0: none
    bool write;
  };
  static constexpr int kKept = 4;  // accesses of a word of four bytes; of more, the last ones
  struct Word {
    Access last[kKept];
  };

  const unsigned char* memory_;
  size_t bytes_;
  std::vector<Clock> clocks_;
  std::vector<Word> words_;
};

}  // namespace simulator
