// How fast this GPU's memory can be read: every multiprocessor streams its own contiguous share of a large array
// through a shared-memory ring of bulk copies, as the decode kernel streams weights, and looks at one word of each
// copy.
//
// Compiled on the spot and called by bandwidth.py; needs compute capability 9.0 or later.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace {

constexpr int kSlots = 5, kSlotBytes = 32 << 10, kRepeats = 20;

std::string failure;

bool failed(cudaError_t e, const char* what) {
  if (e != cudaSuccess) failure = std::string(what) + ": " + cudaGetErrorString(e);
  return e != cudaSuccess;
}

// What the array holds: data that looks random, because zeros cost less power and may be read faster.
__host__ __device__ uint32_t word_at(uint64_t index) {
  uint32_t x = static_cast<uint32_t>(index) * 0x9E3779B1u + static_cast<uint32_t>(index >> 32);
  x = (x ^ (x >> 15)) * 0x85EBCA77u;
  return x ^ (x >> 13);
}

__global__ void fill(uint32_t* words, uint64_t count) {
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  for (uint64_t i = blockIdx.x * static_cast<uint64_t>(blockDim.x) + threadIdx.x; i < count; i += step)
    words[i] = word_at(i);
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Asks for the copy of one slot; its bytes complete the current phase of the slot's barrier.
__device__ __forceinline__ void fetch(uint32_t slot, uint32_t barrier, const char* source) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(kSlotBytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(slot),
               "l"(source), "r"(kSlotBytes), "r"(barrier)
               : "memory");
}

// True once the phase with this parity is over.
__device__ __forceinline__ bool passed(uint32_t barrier, uint32_t parity) {
  uint32_t result;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(result)
               : "r"(barrier), "r"(parity)
               : "memory");
  return result != 0;
}

// One thread per block does everything: the copies are the work.
__global__ void __launch_bounds__(32, 1) read_all(const char* data, uint64_t chunks, uint32_t* found) {
  extern __shared__ __align__(128) char ring[];
  __shared__ __align__(8) uint64_t full[kSlots];
  if (threadIdx.x != 0) return;
  for (int s = 0; s < kSlots; ++s)
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(&full[s])) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");

  const uint64_t begin = chunks * blockIdx.x / gridDim.x, end = chunks * (blockIdx.x + 1) / gridDim.x;
  const uint32_t count = static_cast<uint32_t>(end - begin);
  const char* source = data + begin * kSlotBytes;
  const auto ask = [&](uint32_t c) {
    fetch(shared_address(ring) + c % kSlots * kSlotBytes, shared_address(&full[c % kSlots]),
          source + static_cast<uint64_t>(c) * kSlotBytes);
  };
  for (uint32_t c = 0; c < kSlots && c < count; ++c) ask(c);
  uint32_t seen = 0;
  for (uint32_t c = 0; c < count; ++c) {
    const uint32_t slot = c % kSlots, parity = c / kSlots & 1u;  // a slot's barrier has one phase per chunk
    while (!passed(shared_address(&full[slot]), parity)) {
    }
    seen ^= *reinterpret_cast<volatile uint32_t*>(ring + slot * kSlotBytes);
    if (c + kSlots < count) {
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // read before the next copy writes
      ask(c + kSlots);
    }
  }
  found[blockIdx.x] = seen;
}

double median_seconds(const char* data, uint64_t chunks, uint32_t* found, int blocks) {
  constexpr int bytes = kSlots * kSlotBytes;
  if (failed(cudaFuncSetAttribute(read_all, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "shared memory"))
    return -1.0;
  cudaEvent_t begin = nullptr, end = nullptr;
  if (failed(cudaEventCreate(&begin), "event")) return -1.0;
  if (failed(cudaEventCreate(&end), "event")) return cudaEventDestroy(begin), -1.0;
  std::vector<float> times;
  for (int i = -2; i < kRepeats; ++i) {  // two to warm up
    cudaEventRecord(begin);
    read_all<<<blocks, 32, bytes>>>(data, chunks, found);
    cudaEventRecord(end);
    float milliseconds = 0.0f;
    if (failed(cudaGetLastError(), "launch") || failed(cudaEventSynchronize(end), "reading") ||
        failed(cudaEventElapsedTime(&milliseconds, begin, end), "timing"))
      break;
    if (i >= 0) times.push_back(milliseconds);
  }
  cudaEventDestroy(begin), cudaEventDestroy(end);
  if (times.size() < kRepeats) return -1.0;
  std::sort(times.begin(), times.end());
  return times[kRepeats / 2] * 1e-3;
}

}  // namespace

extern "C" {

// Why the last call failed.
const char* read_bandwidth_failure() { return failure.c_str(); }

// Bytes per second of reading about `bytes` bytes, the median of 20 runs; negative: it failed.
double read_bandwidth(int device, size_t bytes) {
  const uint64_t chunks = bytes / kSlotBytes, words = chunks * kSlotBytes / sizeof(uint32_t);
  int blocks = 0;
  if (failed(cudaSetDevice(device), "device") ||
      failed(cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, device), "multiprocessors"))
    return -1.0;
  char* data = nullptr;
  uint32_t* found = nullptr;
  double seconds = -1.0;
  std::vector<uint32_t> on_host(blocks);
  if (!failed(cudaMalloc(&data, chunks * kSlotBytes), "memory to read") &&
      !failed(cudaMalloc(&found, blocks * sizeof(uint32_t)), "memory for results")) {
    fill<<<8 * blocks, 256>>>(reinterpret_cast<uint32_t*>(data), words);
    if (!failed(cudaGetLastError(), "filling")) seconds = median_seconds(data, chunks, found, blocks);
    if (seconds > 0 &&
        failed(cudaMemcpy(on_host.data(), found, blocks * sizeof(uint32_t), cudaMemcpyDeviceToHost), "results"))
      seconds = -1.0;
  }
  cudaFree(found), cudaFree(data);
  if (seconds <= 0) return -1.0;
  uint32_t expected = 0, seen = 0;
  for (uint64_t c = 0; c < chunks; ++c) expected ^= word_at(c * (kSlotBytes / sizeof(uint32_t)));
  for (const uint32_t x : on_host) seen ^= x;
  if (seen != expected) return failure = "the kernel read something other than was written", -1.0;
  return static_cast<double>(chunks * kSlotBytes) / seconds;
}

}  // extern "C"
