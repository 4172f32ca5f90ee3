// Correctly rounded cos and sin of an fp32 angle, for the RoPE table (docs/numerics.md 3). fp64 operations only and no
// libm, so that every host builds the same table.
#pragma once

#include <cmath>

#include "portability.h"

namespace muse {

// Angles reach 2^20 (a million positions): n = round(angle * 2/pi) has 20 bits, and each of the first two parts of pi/2
// has 33 bits, so n times either is exact in fp64 and the reduced angle carries about 2^-100 of error.
MUSE_FN void cos_sin(float angle, float* cosine, float* sine) {
  const double x = angle, n = nearbyint(x * 0.63661977236758134308);
  double r = x - n * 0x1.921fb54400000p+0;
  r = r - n * 0x1.0b4611a600000p-34;
  r = r - n * 0x1.3198a2e037073p-69;
  const double z = r * r;
  double s = 1.0 / 355687428096000.0, c = 1.0 / 20922789888000.0;
  const double sine_terms[] = {-1.0 / 1307674368000.0, 1.0 / 6227020800.0, -1.0 / 39916800.0, 1.0 / 362880.0,
                               -1.0 / 5040.0,          1.0 / 120.0,        -1.0 / 6.0};
  const double cosine_terms[] = {-1.0 / 87178291200.0, 1.0 / 479001600.0, -1.0 / 3628800.0, 1.0 / 40320.0,
                                 -1.0 / 720.0,         1.0 / 24.0,        -1.0 / 2.0};
  for (const double term : sine_terms) s = s * z + term;
  for (const double term : cosine_terms) c = c * z + term;
  s = r + r * z * s;
  c = 1.0 + z * c;
  switch (static_cast<int64_t>(n) & 3) {
    case 0:
      *cosine = static_cast<float>(c), *sine = static_cast<float>(s);
      break;
    case 1:
      *cosine = static_cast<float>(-s), *sine = static_cast<float>(c);
      break;
    case 2:
      *cosine = static_cast<float>(-c), *sine = static_cast<float>(-s);
      break;
    default:
      *cosine = static_cast<float>(s), *sine = static_cast<float>(-c);
      break;
  }
}

}  // namespace muse
