#include "ffi/device/ptx.cuh"
#include "ffi/numerics/elementary.h"
#include "ffi/ops/attention/attention.h"
#include "ffi/ops/attention/chunks.h"
#include "ffi/ops/launch.cuh"
#include "ffi/ops/rope/head.cuh"
#include "ffi/ops/shared_memory.cuh"

namespace muse {
namespace {

// A warp takes sixteen rows: query rows times the query heads of one kv head, so that a group's heads share K and V.
constexpr int kWarps = 4, kThreads = 32 * kWarps, kWarpRows = 16, kBlockRows = kWarps * kWarpRows;
constexpr int kChunkRows = static_cast<int>(kChunk), kKeyBytes = kChunkRows * kTileRowBytes;  // K or V of one chunk
constexpr int kStages = 2, kSharedBytes = kStages * 2 * kKeyBytes;
static_assert(kHead * 2 == kTileRowBytes, "a head is one row of a tile");

struct Span {
  int first, last;  // positions that a row sees; empty when last < first
};

__device__ __forceinline__ Span seen(const Attention& op, int position) {
  const int64_t start = op.window > 0 ? position - op.window + 1 : 0;
  return {static_cast<int>(start > 0 ? start : 0), position < op.keys ? position : static_cast<int>(op.keys) - 1};
}

__device__ __forceinline__ Span join(Span a, Span b) {
  if (a.last < a.first) return b;
  if (b.last < b.first) return a;
  return {min(a.first, b.first), max(a.last, b.last)};
}

constexpr uint32_t kOnes = 0x3F803F80u;  // two bf16 ones

// Numerators and denominator of the warp's rows: results of mma, eight tiles of eight head elements, and one of ones.
struct Sums {
  float numerator[kHead / 8][4];
  float denominator[2];  // of row lane / 4 and of the one eight below

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int d = 0; d < kHead / 8; ++d)
#pragma unroll
      for (int r = 0; r < 4; ++r) numerator[d][r] = 0.0f;
    denominator[0] = denominator[1] = 0.0f;
  }
  __device__ __forceinline__ void add(const Sums& other) {
#pragma unroll
    for (int d = 0; d < kHead / 8; ++d)
#pragma unroll
      for (int r = 0; r < 4; ++r) numerator[d][r] = numerator[d][r] + other.numerator[d][r];
    denominator[0] = denominator[0] + other.denominator[0];
    denominator[1] = denominator[1] + other.denominator[1];
  }
};

__device__ __forceinline__ uint32_t pack(uint16_t low, uint16_t high) {
  return static_cast<uint32_t>(low) | static_cast<uint32_t>(high) << 16;
}

__global__ void __launch_bounds__(kThreads) attention_kernel(Attention op, const uint16_t* q, const uint16_t* k,
                                                             const uint16_t* v, const int32_t* position, uint16_t* a) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ Span warp_spans[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = static_cast<int>(op.heads / op.kv_heads);
  const int64_t pairs = op.rows * group, tiles = (pairs + kBlockRows - 1) / kBlockRows;
  // The longest rows of causal attention come last; start with them.
  const int64_t tile = tiles - 1 - blockIdx.x / (op.batch * op.kv_heads), rest = blockIdx.x % (op.batch * op.kv_heads);
  const int64_t sequence = rest / op.kv_heads, kv_head = rest % op.kv_heads;

  // This thread's two rows, eight apart; worked out again at the end, not kept in registers.
  const int64_t first_pair = tile * kBlockRows + warp * kWarpRows + lane / 4;
  const auto inside = [&](int i) { return first_pair + 8 * i < pairs; };
  const auto head_at = [&](int i) {
    const int64_t pair = inside(i) ? first_pair + 8 * i : 0;
    return (((sequence * op.rows + pair / group) * op.heads) + kv_head * group + pair % group) * kHead;
  };
  Span span[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) span[i] = inside(i) ? seen(op, position[(first_pair + 8 * i) / group]) : Span{0, -1};
  Span warp_span = join(span[0], span[1]);
#pragma unroll
  for (int width = 4; width < 32; width *= 2)
    warp_span = join(warp_span, {__shfl_xor_sync(kFullWarp, warp_span.first, width),
                                 __shfl_xor_sync(kFullWarp, warp_span.last, width)});
  if (lane == 0) warp_spans[warp] = warp_span;
  __syncthreads();
  Span all = warp_spans[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) all = join(all, warp_spans[w]);

  uint32_t query[kHead / 16][4];
#pragma unroll
  for (int b = 0; b < kHead / 16; ++b)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      query[b][j] = inside(j & 1)
                        ? *reinterpret_cast<const uint32_t*>(q + head_at(j & 1) + 16 * b + lane % 4 * 2 + 8 * (j >> 1))
                        : 0u;

  const int64_t stride = op.kv_heads * kHead;
  const uint16_t* keys = k + (sequence * op.keys * op.kv_heads + kv_head) * kHead;
  const uint16_t* values = v + (sequence * op.keys * op.kv_heads + kv_head) * kHead;
  const uint32_t base = ptx::shared_address(shared);
  const auto fetch = [&](int chunk) {
    const uint32_t stage = base + chunk % kStages * 2 * kKeyBytes;
    for (int part = threadIdx.x; part < kChunkRows * kTileChunks; part += kThreads) {
      const int row = part / kTileChunks, p = chunk * kChunkRows + row;
      const bool there = p < op.keys;
      const int64_t at = (there ? p : 0) * stride + part % kTileChunks * 8;
      ptx::copy16(stage + tile_offset(row, part % kTileChunks), keys + at, there);
      ptx::copy16(stage + kKeyBytes + tile_offset(row, part % kTileChunks), values + at, there);
    }
  };
  const uint32_t key_at = tile_offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
  const uint32_t value_at = kKeyBytes + tile_offset((lane & 7) + (((lane >> 3) & 1) << 3), lane >> 4);

  Sums chunk_sums, super, total;
  super.clear();
  total.clear();
  const int first_chunk = all.first / kChunkRows,
            last_chunk = all.last < all.first ? first_chunk - 1 : all.last / kChunkRows;
  if (first_chunk <= last_chunk) fetch(first_chunk);
  ptx::commit_copies();
#pragma unroll 1
  for (int chunk = first_chunk; chunk <= last_chunk; ++chunk) {
    if (chunk < last_chunk) fetch(chunk + 1);
    ptx::commit_copies();
    ptx::wait_copies<1>();
    __syncthreads();
    const uint32_t stage = base + chunk % kStages * 2 * kKeyBytes;
    chunk_sums.clear();
#pragma unroll 1
    for (int block = 0; block < kChunkRows / 16; ++block) {
      const int start = chunk * kChunkRows + block * 16;
      if (start > warp_span.last || start + 15 < warp_span.first) continue;
      const uint32_t rows = stage + block * 16 * kTileRowBytes;
      float score[2][4] = {};
#pragma unroll
      for (int b = 0; b < kHead / 16; ++b) {
        uint32_t fragment[4];
        ptx::ldmatrix_x4(fragment, rows + (key_at ^ (b << 5)));
        const uint32_t low[2] = {fragment[0], fragment[1]}, high[2] = {fragment[2], fragment[3]};
        ptx::mma_bf16(score[0], query[b], low);
        ptx::mma_bf16(score[1], query[b], high);
      }
      // The scores' places in mma's result are those of its left operand: p needs no exchange.
      uint32_t p[4];
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint16_t bits[2];
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int at = start + 8 * half + lane % 4 * 2 + r;
            const bool visible = at >= span[i].first && at <= span[i].last;
            bits[r] = visible ? to_bf16(exp1(score[half][2 * i + r] * op.scale)) : uint16_t{0};
          }
          p[2 * half + i] = pack(bits[0], bits[1]);
        }
      const uint32_t ones[2] = {kOnes, kOnes};
      float sum[4] = {chunk_sums.denominator[0], 0.0f, chunk_sums.denominator[1],
                      0.0f};  // the other columns are unused
      ptx::mma_bf16(sum, p, ones);
      chunk_sums.denominator[0] = sum[0];
      chunk_sums.denominator[1] = sum[2];
#pragma unroll
      for (int d = 0; d < kHead / 16; ++d) {
        uint32_t fragment[4];
        ptx::ldmatrix_x4_trans(fragment, rows + (value_at ^ (d << 5)));
        const uint32_t low[2] = {fragment[0], fragment[1]}, high[2] = {fragment[2], fragment[3]};
        ptx::mma_bf16(chunk_sums.numerator[2 * d], p, low);
        ptx::mma_bf16(chunk_sums.numerator[2 * d + 1], p, high);
      }
    }
    super.add(chunk_sums);
    if ((chunk + 1) % (kSuperChunk / kChunk) == 0) {
      total.add(super);
      super.clear();
    }
    __syncthreads();  // before this stage is filled again
  }
  total.add(super);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!inside(i)) continue;
#pragma unroll
    for (int d = 0; d < kHead / 8; ++d) {
      const float* n = &total.numerator[d][2 * i];
      *reinterpret_cast<uint32_t*>(a + head_at(i) + 8 * d + lane % 4 * 2) =
          pack(to_bf16(n[0] / total.denominator[i]), to_bf16(n[1] / total.denominator[i]));
    }
  }
}

constexpr int kGateThreads = 256, kHeadsPerBlock = kGateThreads / kLanes;

__global__ void __launch_bounds__(kGateThreads)
    gate_kernel(int64_t heads, float eps, const uint16_t* a, const uint16_t* u, uint16_t* o) {
  const int64_t head = static_cast<int64_t>(blockIdx.x) * kHeadsPerBlock + threadIdx.x / kLanes;
  const int64_t at = head * kHead + threadIdx.x % kLanes;
  float x[kHeadTerms];
#pragma unroll
  for (int i = 0; i < kHeadTerms; ++i) x[i] = head < heads ? from_bf16(a[at + i * kLanes]) : 0.0f;
  const float r = inverse_rms(head_sumsq(x), kHead, eps);
  if (head >= heads) return;
#pragma unroll
  for (int i = 0; i < kHeadTerms; ++i)
    o[at + i * kLanes] = to_bf16((x[i] * r) * sigmoid(from_bf16(u[at + i * kLanes])));
}

}  // namespace

Status attention(Stream stream, Attention op, const uint16_t* q, const uint16_t* k, const uint16_t* v,
                 const int32_t* position, uint16_t* a) {
  const char* name = "attention";
  if (op.batch * op.rows * op.heads == 0) return {};
  if (const Status status = allow_shared(name, attention_kernel, kSharedBytes); !status.ok()) return status;
  const int64_t tiles = divide_up(op.rows * (op.heads / op.kv_heads), kBlockRows);
  attention_kernel<<<static_cast<unsigned>(tiles * op.batch * op.kv_heads), kThreads, kSharedBytes,
                     cuda_stream(stream)>>>(op, q, k, v, position, a);
  return launched(name);
}

Status attention_gate(Stream stream, int64_t rows, int64_t heads, float eps, const uint16_t* a, const uint16_t* u,
                      uint16_t* o) {
  if (rows * heads == 0) return {};
  gate_kernel<<<blocks_for(rows * heads, kHeadsPerBlock), kGateThreads, 0, cuda_stream(stream)>>>(rows * heads, eps, a,
                                                                                                  u, o);
  return launched("attention_gate");
}

}  // namespace muse
