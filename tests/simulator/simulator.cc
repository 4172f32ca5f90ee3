#include "simulator.h"

#include <cuda_runtime.h>
#include <sched.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <dlfcn.h>
#include <execinfo.h>
#include <chrono>
#include <cstdio>
#include <random>
#include <thread>

// The fused kernels' dynamic shared memory; each block is a thread.
namespace muse {
alignas(128) thread_local unsigned char block_memory[kSimulatedShared];
alignas(128) thread_local unsigned char draft_memory[kSimulatedShared];
}  // namespace muse

namespace simulator {
namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr int kBarriers = 16;
constexpr int kNothing = 0xFF;  // what memory holds before something arrives

[[noreturn]] void wrong(const char* what) {
  fprintf(stderr, "simulator: %s, block %u, thread %u\n", what, block_index().x, thread_index().x);
  abort();
}

uint64_t seed() {
  const char* text = getenv("MUSE_SIMULATOR_SEED");
  return text ? strtoull(text, nullptr, 10) : 0;
}

struct Copy {
  void* to;
  const void* from;
  unsigned bytes;
  int group;  // commits before it
};

struct Barrier {
  unsigned arrived = 0;
  uint64_t generation = 0;
};

// Meetings alternate between two places: nobody comes to the next but one before all have left this one.
struct Warp {
  Exchange in[2], out[2];
  const char* what = nullptr;
  unsigned arrived = 0;
  uint64_t generation = 0;
};

struct Fiber {
  ucontext_t start;
  jmp_buf at;
  Dim3 index;
  enum class State { kNew, kReady, kStopped, kEnded } state = State::kNew;
  const uint64_t* waits_for = nullptr;  // a generation that must have moved on
  uint64_t generation = 0;
  uint64_t sleeps_until = 0;  // a round
  std::vector<Copy> copies;
  int groups = 0;
  void* where = nullptr;
};

struct BulkCopy {
  void* to;
  const void* from;
  uint32_t bytes;
  uint64_t* barrier;
};

struct Block {
  Dim3 grid, size, index;
  const std::function<void()>* body;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barriers[kBarriers];
  std::vector<BulkCopy> bulk;
  std::minstd_rand random;
  jmp_buf scheduler;
  Fiber* now = nullptr;
  uint64_t round = 0;  // of looks at all warps
  bool moved = false;  // something happened in this round that others may wait for
};

thread_local Block* block = nullptr;
thread_local bool dumping = false;
void resume(Fiber& f);

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
  }
  memcpy(barrier, &b, sizeof(b));
}

void switch_to_scheduler() {
  Fiber* own = block->now;
  if (_setjmp(own->at) == 0) _longjmp(block->scheduler, 1);
}

void wait_for(const uint64_t* generation, uint64_t old) {
  block->now->waits_for = generation, block->now->generation = old;
  switch_to_scheduler();
  while (dumping) {
    void* stack[20];
    const int n = backtrace(stack, 20);
    fprintf(stderr, "STACK thread %u\n", block->now->index.x);
    backtrace_symbols_fd(stack, n, 2);
    switch_to_scheduler();
  }
  block->now->waits_for = nullptr;
}

void fiber_main() {
  (*block->body)();
  Fiber* own = block->now;
  if (!own->copies.empty()) wrong("a thread ended with copies under way");
  own->state = Fiber::State::kEnded;
  block->moved = true;
  _longjmp(block->scheduler, 1);
}

void land(size_t which) {
  const BulkCopy copy = block->bulk[which];
  block->bulk[which] = block->bulk.back(), block->bulk.pop_back();
  memcpy(copy.to, copy.from, copy.bytes);
  Mbarrier b = load(copy.barrier);
  b.bytes -= static_cast<int32_t>(copy.bytes);
  store(copy.barrier, b);
}

bool can_run(const Fiber& f) {
  return f.state != Fiber::State::kEnded && f.sleeps_until <= block->round &&
         (!f.waits_for || *f.waits_for != f.generation);
}

void resume(Fiber& f) {
  block->now = &f;
  if (_setjmp(block->scheduler) == 0) {
    if (f.state == Fiber::State::kNew) {
      f.state = Fiber::State::kReady;
      setcontext(&f.start);
    }
    _longjmp(f.at, 1);
  }
}

void run_block(unsigned char* stacks) {
  Block& b = *block;
  const unsigned threads = b.size.x, warps = (threads + 31) / 32;
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& f = b.fibers[i];
    f.index = {i, 0, 0};
    getcontext(&f.start);
    f.start.uc_stack.ss_sp = stacks + i * kStackBytes;
    f.start.uc_stack.ss_size = kStackBytes;
    f.start.uc_link = nullptr;
    makecontext(&f.start, fiber_main, 0);
  }
  std::vector<unsigned> order(warps);
  for (unsigned w = 0; w < warps; ++w) order[w] = w;
  auto last = std::chrono::steady_clock::now();
  for (bool alive = true; alive;) {
    alive = false;
    b.moved = false;
    ++b.round;
    std::shuffle(order.begin(), order.end(), b.random);
    for (const unsigned w : order) {
      // A warp goes on for a while: most of what it waits for is itself.
      for (unsigned turns = 1 + b.random() % 64; turns > 0; --turns) {
        const uint64_t before = b.warps[w].generation;
        for (unsigned i = 32 * w; i < std::min(32 * w + 32, threads); ++i)
          if (can_run(b.fibers[i])) resume(b.fibers[i]);
        if (b.warps[w].generation == before) break;
      }
      for (unsigned i = 32 * w; i < std::min(32 * w + 32, threads); ++i)
        alive = alive || b.fibers[i].state != Fiber::State::kEnded;
    }
    static const double limit = getenv("SIMWATCH") ? atof(getenv("SIMWATCH")) : 0;
    if (b.moved) last = std::chrono::steady_clock::now();
    if (limit && std::chrono::steady_clock::now() - last > std::chrono::duration<double>(limit)) {
      static std::mutex m; std::lock_guard<std::mutex> g(m);
      last = std::chrono::steady_clock::now() + std::chrono::hours(1);
      static int dumps = 2;
      if (dumps-- > 0) { dumping = true; for (unsigned i : {0u, 1u, 15u, 16u, 31u}) if (b.fibers[i].waits_for) resume(b.fibers[i]); dumping = false; }
      fprintf(stderr, "STUCK block %u bulk %zu\n", b.index.x, b.bulk.size());
      for (unsigned w = 0; w < warps; ++w) {
        std::map<std::tuple<void*, int, bool>, int> count;
        for (unsigned i = 32 * w; i < 32 * w + 32; ++i) ++count[{b.fibers[i].where, int(b.fibers[i].state), can_run(b.fibers[i])}];
        for (auto& [k, n] : count) { Dl_info info; dladdr(std::get<0>(k), &info); fprintf(stderr, "  warp %u: %d at %lx state %d run %d what %s\n", w, n, (unsigned long)((char*)std::get<0>(k) - (char*)info.dli_fbase), std::get<1>(k), std::get<2>(k), b.warps[w].what ? b.warps[w].what : ""); }
      }
    }
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

void look_again() {
  block->now->where = __builtin_return_address(0);
  switch_to_scheduler();
}

void sleep() {
  block->now->sleeps_until = block->round + 8;
  look_again();
}

void moved() { block->moved = true; }

void barrier(int index, unsigned threads) {
  block->now->where = __builtin_return_address(0);
  Barrier& b = block->barriers[index];
  const uint64_t generation = b.generation;
  if (++b.arrived < threads) return wait_for(&b.generation, generation);
  b.arrived = 0;
  ++b.generation;
  block->moved = true;
}

void meet(const char* what, const void* in, size_t in_bytes, void* out, size_t out_bytes,
          void (*combine)(const Exchange& in, Exchange& out)) {
  Warp& w = block->warps[thread_index().x / 32];
  block->now->where = __builtin_return_address(0);
  const uint64_t generation = w.generation;
  const int place = generation % 2;
  const unsigned own = lane();
  if (w.arrived == 0) w.what = what;
  if (strcmp(w.what, what) != 0) wrong((std::string(w.what) + " and " + what + " in one warp").c_str());
  memcpy(w.in[place][own], in, in_bytes);
  if (++w.arrived < 32) {
    wait_for(&w.generation, generation);
  } else {
    combine(w.in[place], w.out[place]);
    w.arrived = 0;
    ++w.generation;
  }
  memcpy(out, w.out[place][own], out_bytes);
}

void copy(void* to, const void* from, unsigned bytes) {
  Fiber& f = *block->now;
  f.copies.push_back({to, from, bytes, f.groups});
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
  store(barrier, b);
}

bool mbarrier_past(const uint64_t* barrier, uint32_t parity) { return load(barrier).parity != parity; }

void bulk_copy(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  if (bytes % 16 || reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16)
    wrong("a bulk copy of what is no multiple of 16 bytes");
  memset(to, kNothing, bytes);
  block->bulk.push_back({to, from, bytes, barrier});
}

void launch(Dim3 grid, Dim3 size, size_t shared_bytes, const std::function<void()>& body) {
  const size_t stack_bytes = kStackBytes * size.x;
  auto* stacks = static_cast<unsigned char*>(mmap(nullptr, stack_bytes * grid.x, PROT_READ | PROT_WRITE,
                                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
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
      own.warps = std::vector<Warp>((size.x + 31) / 32);
      own.random.seed(static_cast<unsigned>(seed() * 1000003 + i + 1));
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
