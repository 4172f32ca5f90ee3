// Shared memory of tensor-core kernels: the swizzle between asynchronous copies into it and fragments out of it.
#pragma once

#include "ffi/device/ptx.cuh"

namespace muse {

// Tiles have rows of 64 16-bit elements: eight chunks of sixteen bytes. Chunk c of row r lies at c ^ (r % 8), so that
// eight rows of one chunk, which a fragment load reads together, fall into different banks.
constexpr int kTileRowBytes = 128;
constexpr int kTileChunks = 8;

__device__ __forceinline__ uint32_t tile_offset(int row, int chunk) {
  return static_cast<uint32_t>(row * kTileRowBytes + ((chunk ^ (row & 7)) << 4));
}

}  // namespace muse
