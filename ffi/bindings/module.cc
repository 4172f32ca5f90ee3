// The Python module of the CPU backend: hands out FFI handlers and what was built; no computation.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include "ffi/bindings/registry.h"
#include "ffi/ops/rope/table.h"

namespace nb = nanobind;
using namespace muse::bindings;

namespace {

nb::ndarray<nb::numpy, float, nb::ndim<2>> rope_table(int64_t positions, double theta) {
  if (positions < 0 || positions > muse::kMaxPositions)
    throw nb::value_error(("rope_table: " + std::to_string(positions) + " positions, expected 0 to " +
                           std::to_string(muse::kMaxPositions))
                              .c_str());
  float* table = new float[positions * 64];
  const nb::capsule owner(table, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  muse::rope_table(positions, theta, table);
  return {table, {static_cast<size_t>(positions), 64}, owner};
}

}  // namespace

NB_MODULE(_cpu, m) {
  m.doc() = "XLA FFI handlers of muse-jax for the CPU backend.";
  m.def(
      "handlers",
      [] {
        nb::dict result;
        for (const auto& list : {gemm_handlers(), norm_handlers(), attention_handlers(), expert_handlers(),
                                 head_handlers(), numerics_handlers(), decode_handlers()})
          for (const auto& [name, handler] : list) result[name.c_str()] = nb::capsule(reinterpret_cast<void*>(handler));
        return result;
      },
      "Target name -> capsule, for jax.ffi.register_ffi_target.");
  m.def("rope_table", &rope_table, nb::arg("positions"), nb::arg("theta"),
        "fp32 [positions, 64] of positions 0 .. positions-1: 32 cosines, then 32 sines.");
  m.def("api_version", [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
}
