#include "ffi/ops/launch.cuh"
#include "ffi/ops/quantize/quantize.h"
#include "ffi/ops/quantize/row.h"

namespace muse {
namespace {

constexpr int kThreads = 128;
constexpr int kLargestThreads = 256, kLargestPerThread = 32;  // elements of a tensor that one thread looks at

__device__ __forceinline__ void load_block(const uint16_t* x, int64_t block, uint16_t (&values)[16]) {
  const uint4 words[2] = {reinterpret_cast<const uint4*>(x)[2 * block],
                          reinterpret_cast<const uint4*>(x)[2 * block + 1]};
  memcpy(values, words, sizeof(words));
}

__device__ __forceinline__ void store_block(const uint8_t (&codes)[16], int64_t block, uint8_t* packed) {
  uint8_t bytes[8];
  pack_block(codes, bytes);
  uint2 words;
  memcpy(&words, bytes, sizeof(words));
  reinterpret_cast<uint2*>(packed)[block] = words;
}

// One thread per block of sixteen.
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(int64_t blocks, const uint16_t* x, const float* input_scale, uint8_t* packed, uint8_t* scales) {
  const int64_t b = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (b >= blocks) return;
  uint16_t values[16];
  uint8_t codes[16];
  load_block(x, b, values);
  scales[b] = quantize_block(values, *input_scale, codes);
  store_block(codes, b, packed);
}

// largest[g] = the largest magnitude's bf16 bits in tensor g; starts at zero.
__global__ void __launch_bounds__(kLargestThreads) largest_kernel(int64_t size, const uint16_t* w, uint32_t* largest) {
  const int64_t tensor = blockIdx.y, first = static_cast<int64_t>(blockIdx.x) * kLargestThreads * kLargestPerThread;
  uint32_t most = 0;
  for (int64_t i = first + threadIdx.x * 8; i < first + kLargestThreads * kLargestPerThread && i < size;
       i += kLargestThreads * 8) {
    const uint4 words = *reinterpret_cast<const uint4*>(w + tensor * size + i);
    for (const uint32_t word : {words.x, words.y, words.z, words.w})
      most = max(most, max(word & 0x7FFFu, word >> 16 & 0x7FFFu));
  }
  for (int width = 16; width > 0; width /= 2) most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, width));
  if (threadIdx.x % 32 == 0) atomicMax(&largest[tensor], most);
}

// In place: the largest magnitude's bits -> weight_scale_2.
__global__ void scale_kernel(int64_t tensors, float* weight_scale_2) {
  const int64_t g = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (g >= tensors) return;
  const uint16_t amax = static_cast<uint16_t>(bit_cast<uint32_t>(weight_scale_2[g]));
  weight_scale_2[g] = !bf16_finite(amax) ? nan32() : amax == 0 ? 1.0f : from_bf16(amax) / 2688.0f;
}

__global__ void __launch_bounds__(kThreads)
    quantize_weight_kernel(int64_t blocks, int64_t blocks_per_tensor, const uint16_t* w, const float* weight_scale_2,
                           uint8_t* packed, uint8_t* scales) {
  const int64_t b = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (b >= blocks) return;
  uint16_t values[16];
  uint8_t codes[16];
  load_block(w, b, values);
  scales[b] = quantize_weight_block(values, weight_scale_2[b / blocks_per_tensor], codes);
  store_block(codes, b, packed);
}

}  // namespace

Status quantize(Stream stream, int64_t rows, int64_t inner, const uint16_t* x, const float* input_scale, uint8_t* codes,
                uint8_t* scales) {
  const int64_t blocks = rows * inner / 16;
  if (blocks == 0) return {};
  quantize_kernel<<<blocks_for(blocks, kThreads), kThreads, 0, cuda_stream(stream)>>>(blocks, x, input_scale, codes,
                                                                                      scales);
  return launched("quantize");
}

Status quantize_weight(Stream stream, int64_t tensors, int64_t rows, int64_t inner, const uint16_t* w, uint8_t* codes,
                       uint8_t* scales, float* weight_scale_2) {
  const char* op = "quantize_weight";
  if (tensors == 0) return {};
  const cudaStream_t queue = cuda_stream(stream);
  const int64_t size = rows * inner, blocks = tensors * size / 16;
  constexpr int64_t kMaxTensorsPerLaunch = 65535;
  if (const Status status = cuda_status(op, cudaMemsetAsync(weight_scale_2, 0, tensors * sizeof(float), queue));
      !status.ok())
    return status;
  for (int64_t g = 0; size > 0 && g < tensors; g += kMaxTensorsPerLaunch) {
    const dim3 grid(blocks_for(size, kLargestThreads * kLargestPerThread),
                    static_cast<unsigned>(tensors - g < kMaxTensorsPerLaunch ? tensors - g : kMaxTensorsPerLaunch));
    largest_kernel<<<grid, kLargestThreads, 0, queue>>>(size, w + g * size,
                                                        reinterpret_cast<uint32_t*>(weight_scale_2) + g);
  }
  scale_kernel<<<blocks_for(tensors, kThreads), kThreads, 0, queue>>>(tensors, weight_scale_2);
  if (blocks > 0)
    quantize_weight_kernel<<<blocks_for(blocks, kThreads), kThreads, 0, queue>>>(blocks, size / 16, w, weight_scale_2,
                                                                                 codes, scales);
  return launched(op);
}

}  // namespace muse
