// A GPU played on a CPU: enough of CUDA to run this project's kernels, compiled as C++ from the same files.
//
// A block is a thread of the system, its CUDA threads are fibers that go on until they must wait: at a barrier, for
// their warp, or where a loop looks at memory again. All blocks of a launch run at once, as the fused kernels need.
// What hardware leaves open is drawn at random, from MUSE_SIMULATOR_SEED: which warp runs when, and when an
// asynchronous copy arrives, which is as late as it may be; until then its target holds 0xFF bytes, NaN in every
// format, as does shared memory at the start. So a wait that is missing shows as a wrong result.
//
// What is not played: the weak memory order of a GPU, registers, caches, time.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>

namespace simulator {

struct Dim3 {
  Dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  unsigned x, y, z;
};

// The calling CUDA thread.
const Dim3& thread_index();
const Dim3& block_index();
const Dim3& block_size();
const Dim3& grid_size();
unsigned lane();

// For loops that wait: others run first. `sleep`: for a while.
void look_again();
void sleep();
// Something was stored that others may wait for.
void moved();

// Barrier `index` for so many of the block's threads.
void barrier(int index, unsigned threads);
// A meeting of the warp, behind which each sees what the others stored.
void sync_warp();

// What all 32 threads of a warp do together. Each brings `in`, at most 64 bytes; the last to come calls
// combine(all in, all out), [32][64] bytes each, and each takes its `out`. `what`: for the error when threads of a warp
// are at different places.
constexpr int kExchanged = 64;
using Exchange = unsigned char[32][kExchanged];
void meet(const char* what, const void* in, size_t in_bytes, void* out, size_t out_bytes,
          void (*combine)(const Exchange& in, Exchange& out));

template <typename Out, typename In>
Out meet(const char* what, const In& in, void (*combine)(const Exchange& in, Exchange& out)) {
  static_assert(sizeof(In) <= kExchanged && sizeof(Out) <= kExchanged);
  Out out;
  meet(what, &in, sizeof(in), &out, sizeof(out), combine);
  return out;
}
template <typename T>
T at(const Exchange& all, int lane) {
  T value;
  memcpy(&value, all[lane], sizeof(value));
  return value;
}
template <typename T>
void put(Exchange& all, int lane, const T& value) {
  memcpy(all[lane], &value, sizeof(value));
}

// Asynchronous copies of the calling thread (cp.async), in groups.
void copy(void* to, const void* from, unsigned bytes);  // from null: zeros
void commit_copies();
void wait_copies(int pending);  // negative: those of no group too

// Shared memory in 32 bits.
uint32_t shared_address(const void* p);
void* shared_pointer(uint32_t address);

// mbarriers: 64 bits of shared memory.
void mbarrier_init(uint64_t* barrier, uint32_t arrivals);
void mbarrier_arrive(uint64_t* barrier, uint32_t bytes);
bool mbarrier_past(const uint64_t* barrier, uint32_t parity);
void bulk_copy(void* to, const void* from, uint32_t bytes, uint64_t* barrier);

// For races.h: an access of the calling thread to memory that may be shared; and where a place in the code is.
void accessed(const void* p, unsigned bytes, bool write, const void* pc);
void print_place(const char* what, const void* pc);

// Runs a kernel's body for every thread of the grid and returns when all have ended.
void launch(Dim3 grid, Dim3 block, size_t shared_bytes, const std::function<void()>& body);

}  // namespace simulator
