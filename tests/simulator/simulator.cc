#include "simulator.h"

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <sched.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <random>
#include <thread>
#include <unordered_map>

#include "races.h"

// The fused kernels' dynamic shared memory; each block is a thread.
namespace muse {
alignas(128) thread_local unsigned char block_memory[kSimulatedShared];
alignas(128) thread_local unsigned char draft_memory[kSimulatedShared];
}  // namespace muse

namespace simulator {
namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr int kBarriers = 16;
using Clock = std::chrono::steady_clock;
constexpr auto kStuck = std::chrono::seconds(150);  // longer than any wait of the kernels
constexpr int kNothing = 0xFF;                      // what memory holds before something arrives

[[noreturn]] void wrong(const char* what) {
  fprintf(stderr, "simulator: %s, block %u, thread %u\n", what, block_index().x, thread_index().x);
  abort();
}

uint64_t seed() {
  const char* text = getenv("MUSE_SIMULATOR_SEED");
  return text ? strtoull(text, nullptr, 10) : 0;
}

// The compiler's own setjmp: a frame and an address, a few instructions on every processor. It may not jump within one
// function.
using Point = void* [5];
__attribute__((noinline)) void jump(Point& to) { __builtin_longjmp(to, 1); }

struct Copy {
  void* to;
  const void* from;
  unsigned bytes;
  int group;  // commits before it
};

// Threads of a warp as bits.
constexpr unsigned kMaxWarps = 32;

struct Barrier {
  unsigned arrived = 0;
  uint32_t waiting[kMaxWarps] = {};
  Races::Clock arriving, passed;
};

struct Warp {
  uint32_t ready = 0, sleeping = 0;
  uint64_t wakes = 0;  // those who sleep: a round
  // Meetings alternate between two places: nobody comes to the next but one before all have left this one.
  const char* what = nullptr;
  uint32_t arrived = 0;
  uint64_t meetings = 0;
  Exchange in[2], out[2];
  Races::Clock order[2];
};

struct Fiber {
  Point at;
  Dim3 index;
  bool started = false, ended = false;
  const void* waits_for = nullptr;  // a warp or barrier
  std::vector<Copy> copies;
  int groups = 0;
  ucontext_t start;
};

struct BulkCopy {
  void* to;
  const void* from;
  uint32_t bytes;
  uint64_t* barrier;
  Races::Clock order;
};

struct Block {
  Dim3 grid, size, index;
  const std::function<void()>* body;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barriers[kBarriers];
  std::vector<BulkCopy> bulk;
  std::minstd_rand random;
  Point scheduler;
  Fiber* now = nullptr;
  uint64_t round = 0;            // of looks at all warps
  unsigned alive;                // threads that have not ended
  bool stuck = false;            // threads that are resumed say where they are
  bool moved = false;            // something happened in this round that others may wait for
  std::unique_ptr<Races> races;  // null: not looked for
  struct Phases {
    Races::Clock arriving, passed;
  };
  std::unordered_map<const uint64_t*, Phases> mbarriers;  // for races
};

thread_local Block* block = nullptr;

// A phase of an mbarrier in its 64 bits: bytes that are still to come, arrivals likewise, how many a phase has, parity.
struct Mbarrier {
  int32_t bytes;
  uint16_t pending;
  uint16_t arrivals : 15;
  uint16_t parity : 1;
};
static_assert(sizeof(Mbarrier) == 8);

Mbarrier load(const uint64_t* barrier) {
  Mbarrier b;
  memcpy(&b, barrier, sizeof(b));
  return b;
}
void store(uint64_t* barrier, Mbarrier b) {
  if (b.pending == 0 && b.bytes == 0) {
    b.pending = b.arrivals;
    b.parity = !b.parity;
    block->moved = true;
    if (block->races) {
      Block::Phases& phases = block->mbarriers[barrier];
      phases.passed = std::move(phases.arriving);
      phases.arriving.clear();
    }
  }
  memcpy(barrier, &b, sizeof(b));
}

__attribute__((noinline)) void switch_to_scheduler() {
  if (__builtin_setjmp(block->now->at) == 0) jump(block->scheduler);
}

// Goes on when somebody has set the thread's bit again.
void wait_for(const void* what) {
  Fiber& own = *block->now;
  own.waits_for = what;
  block->warps[own.index.x / 32].ready &= ~(1u << own.index.x % 32);
  switch_to_scheduler();
  while (block->stuck) {
    void* stack[32];
    backtrace_symbols_fd(stack, backtrace(stack, 32), STDERR_FILENO);
    switch_to_scheduler();
  }
  own.waits_for = nullptr;
}

void fiber_main() {
  (*block->body)();
  Fiber* own = block->now;
  if (!own->copies.empty()) wrong("a thread ended with copies under way");
  own->ended = true;
  block->warps[own->index.x / 32].ready &= ~(1u << own->index.x % 32);
  --block->alive;
  block->moved = true;
  jump(block->scheduler);
}

void land(size_t which) {
  const BulkCopy copy = block->bulk[which];
  block->bulk[which] = block->bulk.back(), block->bulk.pop_back();
  memcpy(copy.to, copy.from, copy.bytes);
  if (block->races) Races::join(block->mbarriers[copy.barrier].arriving, copy.order);
  Mbarrier b = load(copy.barrier);
  b.bytes -= static_cast<int32_t>(copy.bytes);
  store(copy.barrier, b);
}

__attribute__((noinline)) void resume(Fiber& f) {
  block->now = &f;
  if (__builtin_setjmp(block->scheduler) == 0) {
    if (f.started) jump(f.at);
    f.started = true;
    setcontext(&f.start);
  }
}

// For whoever looks for the fault: of each warp the stacks of the first threads that wait for the same thing (names of
// lines: addr2line -Cfpi -e LIBRARY ADDRESS).
[[noreturn]] void say_where() {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  block->stuck = true;
  for (unsigned i = 0; i < block->fibers.size(); ++i) {
    Fiber& f = block->fibers[i];
    const bool as_before = i % 32 > 0 && block->fibers[i - 1].waits_for == f.waits_for;
    if (as_before || f.ended) continue;
    fprintf(stderr, "simulator: block %u, thread %u %s\n", block->index.x, i, f.waits_for ? "waits:" : "looks again");
    if (f.waits_for) resume(f);
  }
  wrong("nothing has happened for long");
}

void run_block(unsigned char* stacks) {
  Block& b = *block;
  const unsigned threads = b.size.x, warps = threads / 32;
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& f = b.fibers[i];
    f.index = {i, 0, 0};
    getcontext(&f.start);
    f.start.uc_stack.ss_sp = stacks + i * kStackBytes;
    // Ends at different places of a page: the processor's caches would keep few of so many equal addresses.
    f.start.uc_stack.ss_size = kStackBytes - i * 1088 % (kStackBytes / 4);
    f.start.uc_link = nullptr;
    makecontext(&f.start, fiber_main, 0);
  }
  std::vector<unsigned> order(warps);
  for (unsigned w = 0; w < warps; ++w) order[w] = w, b.warps[w].ready = ~0u;
  b.alive = threads;
  Clock::time_point last = Clock::now();
  while (b.alive > 0) {
    b.moved = false;
    ++b.round;
    std::shuffle(order.begin(), order.end(), b.random);
    for (const unsigned w : order) {
      Warp& warp = b.warps[w];
      if (warp.sleeping && warp.wakes <= b.round) warp.ready |= warp.sleeping, warp.sleeping = 0;
      // A warp goes on for a while: most of what it waits for is itself.
      for (unsigned turns = 1 + b.random() % 64; turns > 0 && warp.ready; --turns) {
        const uint64_t before = warp.meetings;
        for (uint32_t left = warp.ready; left; left &= left - 1) resume(b.fibers[32 * w + __builtin_ctz(left)]);
        if (warp.meetings == before) break;
      }
    }
    const auto now = Clock::now();
    if (b.moved) last = now;
    if (now - last > kStuck) say_where();
    if (!b.bulk.empty() && (!b.moved || b.random() % 4 == 0)) {
      land(b.random() % b.bulk.size());
    } else if (!b.moved) {
      sched_yield();
    }
  }
  if (!b.bulk.empty()) wrong("a block ended with bulk copies under way");
}

}  // namespace

const Dim3& thread_index() { return block->now->index; }
const Dim3& block_index() { return block->index; }
const Dim3& block_size() { return block->size; }
const Dim3& grid_size() { return block->grid; }
unsigned lane() { return thread_index().x % 32; }

void look_again() { switch_to_scheduler(); }

void sleep() {
  const unsigned own = thread_index().x;
  Warp& w = block->warps[own / 32];
  w.ready &= ~(1u << own % 32);
  w.sleeping |= 1u << own % 32;
  w.wakes = block->round + 8;
  switch_to_scheduler();
}

void moved() { block->moved = true; }

void barrier(int index, unsigned threads) {
  Barrier& b = block->barriers[index];
  const unsigned own = thread_index().x;
  if (block->races) block->races->release(own, b.arriving);
  if (++b.arrived < threads) {
    b.waiting[own / 32] |= 1u << own % 32;
    wait_for(&b);
  } else {
    for (size_t w = 0; w < block->warps.size(); ++w) block->warps[w].ready |= b.waiting[w], b.waiting[w] = 0;
    b.arrived = 0;
    block->moved = true;
    b.passed = std::move(b.arriving);
    b.arriving.clear();
  }
  if (block->races) block->races->acquire(own, b.passed);
}

void sync_warp() {
  const unsigned own = thread_index().x;
  Warp& w = block->warps[own / 32];
  Races::Clock& order = w.order[w.meetings % 2];
  if (block->races) {
    if (w.arrived == 0) order.clear();
    block->races->release(own, order);
  }
  meet<char>("__syncwarp", char{}, [](const Exchange&, Exchange&) {});
  if (block->races) block->races->acquire(own, order);
}

void meet(const char* what, const void* in, size_t in_bytes, void* out, size_t out_bytes,
          void (*combine)(const Exchange& in, Exchange& out)) {
  Warp& w = block->warps[thread_index().x / 32];
  const int place = w.meetings % 2;
  const unsigned own = lane();
  if (w.arrived == 0) w.what = what;
  if (strcmp(w.what, what) != 0) wrong((std::string(w.what) + " and " + what + " in one warp").c_str());
  memcpy(w.in[place][own], in, in_bytes);
  w.arrived |= 1u << own;
  if (w.arrived != ~0u) {
    wait_for(&w);
  } else {
    combine(w.in[place], w.out[place]);
    w.ready = ~0u;
    w.arrived = 0;
    ++w.meetings;
  }
  memcpy(out, w.out[place][own], out_bytes);
}

void copy(void* to, const void* from, unsigned bytes) {
  Fiber& f = *block->now;
  f.copies.push_back({to, from, bytes, f.groups});
  accessed(to, bytes, true, __builtin_return_address(0));
  memset(to, kNothing, bytes);
}

void commit_copies() { ++block->now->groups; }

void wait_copies(int pending) {
  Fiber& f = *block->now;
  const int end = pending < 0 ? f.groups + 1 : f.groups - pending;  // groups before it must have landed
  size_t kept = 0;
  for (const Copy& c : f.copies) {
    if (c.group >= end) {
      f.copies[kept++] = c;
    } else if (c.from) {
      memcpy(c.to, c.from, c.bytes);
    } else {
      memset(c.to, 0, c.bytes);
    }
  }
  f.copies.resize(kept);
}

// Shared memory is this thread's own: all of it lies within 2 GB of its start.
uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(p) - muse::block_memory);
}
void* shared_pointer(uint32_t address) { return muse::block_memory + static_cast<int32_t>(address); }

void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  const Mbarrier b{0, static_cast<uint16_t>(arrivals), static_cast<uint16_t>(arrivals), 0};
  memcpy(barrier, &b, sizeof(b));
}

void mbarrier_arrive(uint64_t* barrier, uint32_t bytes) {
  Mbarrier b = load(barrier);
  if (b.pending == 0) wrong("more arrivals at an mbarrier than its phase has");
  --b.pending, b.bytes += static_cast<int32_t>(bytes);
  if (block->races) block->races->release(thread_index().x, block->mbarriers[barrier].arriving);
  store(barrier, b);
}

bool mbarrier_past(const uint64_t* barrier, uint32_t parity) {
  const bool past = load(barrier).parity != parity;
  if (past && block->races) block->races->acquire(thread_index().x, block->mbarriers[barrier].passed);
  return past;
}

void bulk_copy(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  if (bytes % 16 || reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16)
    wrong("a bulk copy of what is no multiple of 16 bytes");
  memset(to, kNothing, bytes);
  BulkCopy copy{to, from, bytes, barrier, {}};
  accessed(to, bytes, true, __builtin_return_address(0));
  if (block->races) block->races->release(thread_index().x, copy.order);
  block->bulk.push_back(std::move(copy));
}

void accessed(const void* p, unsigned bytes, bool write, const void* pc) {
  if (block && block->races && block->now) block->races->access(thread_index().x, p, bytes, write, pc);
}

void print_place(const char* what, const void* pc) {
  Dl_info info{};
  dladdr(pc, &info);
  fprintf(stderr, "  %s: addr2line -Cfpi -e %s %#zx\n", what, info.dli_fname ? info.dli_fname : "?",
          static_cast<size_t>(static_cast<const char*>(pc) - static_cast<const char*>(info.dli_fbase)));
}

void launch(Dim3 grid, Dim3 size, size_t shared_bytes, const std::function<void()>& body) {
  if (size.x % 32 || size.x > 32 * kMaxWarps) {
    fprintf(stderr, "simulator: a block of %u threads, expected whole warps, at most %u\n", size.x, kMaxWarps);
    abort();
  }
  const size_t stack_bytes = kStackBytes * size.x;
  auto* stacks = static_cast<unsigned char*>(
      mmap(nullptr, stack_bytes * grid.x, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (stacks == MAP_FAILED) {
    perror("simulator: stacks");
    abort();
  }
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < grid.x; ++i)
    threads.emplace_back([&, i] {
      Block own;
      own.grid = grid, own.size = size, own.index = {i, 0, 0};
      own.body = &body;
      own.fibers = std::vector<Fiber>(size.x);
      own.warps = std::vector<Warp>(size.x / 32);
      own.random.seed(static_cast<unsigned>(seed() * 1000003 + i + 1));
#if defined(MUSE_SIMULATOR_RACES)
      const unsigned char* begin = std::min<unsigned char*>(muse::block_memory, muse::draft_memory);
      const unsigned char* last = std::max<unsigned char*>(muse::block_memory, muse::draft_memory);
      own.races = std::make_unique<Races>(size.x, begin, static_cast<size_t>(last - begin) + kSimulatedShared);
#endif
      block = &own;
      memset(muse::block_memory, kNothing, shared_bytes);
      memset(muse::draft_memory, kNothing, shared_bytes);
      run_block(stacks + i * stack_bytes);
      block = nullptr;
    });
  for (std::thread& t : threads) t.join();
  munmap(stacks, stack_bytes * grid.x);
}

}  // namespace simulator

int simulated_multiprocessors() {
  const char* text = getenv("MUSE_SIMULATOR_MULTIPROCESSORS");
  return text ? atoi(text) : 64;
}
