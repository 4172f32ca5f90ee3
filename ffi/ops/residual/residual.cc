#include "ffi/ops/residual/residual.h"

#include "ffi/comm/pool.h"
#include "ffi/ops/residual/row.h"

namespace muse {
namespace {

MUSE_CLONES void coefficients(const uint16_t* gate, int64_t n, float temperature, float* alpha, float* beta) {
  gate_coefficient_row(gate, n, temperature, alpha, beta);
}

MUSE_CLONES void one_row(const float* s, const uint16_t* n, const float* alpha, const float* beta, int64_t columns,
                         float* out) {
  residual_row(s, n, alpha, beta, columns, out);
}

}  // namespace

Status gate_coefficients(Stream, int64_t columns, float temperature, const uint16_t* gate, float* alpha, float* beta) {
  coefficients(gate, columns, temperature, alpha, beta);
  return {};
}

Status residual(Stream, int64_t rows, int64_t columns, const float* s, const uint16_t* n, const float* alpha,
                const float* beta, float* out) {
  parallel_for(rows,
               [&](int64_t t) { one_row(s + t * columns, n + t * columns, alpha, beta, columns, out + t * columns); });
  return {};
}

}  // namespace muse
