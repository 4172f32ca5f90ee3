// fsum16 on the device: the tensor core itself (docs/numerics.md 4).
#pragma once

#include "formats.h"

namespace muse {

// d += a b for one 16 x 8 tile over 16 k. Registers as PTX defines them for mma.m16n8k16: a[j] holds (row g + 8 (j &
// 1), k 2t + 8 (j >> 1) and the next), b[j] holds (k 2t + 8 j and the next, column g), d[j] holds (row g + 8 (j >> 1),
// column 2t + (j & 1)), with g = lane / 4, t = lane % 4. Sixteen-bit pairs: the lower k in the low half.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_fp16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace muse
