// The Python module of the CPU backend: hands out FFI handlers and what was built; no computation.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "ffi/bindings/registry.h"
#include "ffi/draft/workspace.h"
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

// dims: the attribute of the draft call (ffi/bindings/draft.cc); slots of each layer's ring.
int64_t draft_workspace_bytes(const std::array<int64_t, muse::kDraftDims>& dims, const std::vector<int64_t>& slots,
                              int64_t batch, int64_t fed) {
  muse::DraftPlan p{};
  if (slots.size() > static_cast<size_t>(muse::kMaxDraftLayers))
    throw nb::value_error(
        ("a draft has " + std::to_string(slots.size()) + " layers, allowed: " + std::to_string(muse::kMaxDraftLayers))
            .c_str());
  muse::read_dims(dims.data(), &p);
  p.layers = static_cast<int64_t>(slots.size()), p.batch = batch, p.fed = fed;
  std::copy(slots.begin(), slots.end(), p.slots);
  return muse::draft_workspace(p).bytes;
}

}  // namespace

NB_MODULE(_cpu, m) {
  m.doc() = "XLA FFI handlers of muse-jax for the CPU backend.";
  m.def(
      "handlers",
      [] {
        nb::dict result;
        for (const auto& list :
             {gemm_handlers(), norm_handlers(), attention_handlers(), expert_handlers(), head_handlers(),
              numerics_handlers(), decode_handlers(), draft_handlers(), accept_handlers()})
          for (const auto& [name, handler] : list) result[name.c_str()] = nb::capsule(reinterpret_cast<void*>(handler));
        return result;
      },
      "Target name -> capsule, for jax.ffi.register_ffi_target.");
  m.def("rope_table", &rope_table, nb::arg("positions"), nb::arg("theta"),
        "fp32 [positions, 64] of positions 0 .. positions-1: 32 cosines, then 32 sines.");
  m.def("draft_workspace_bytes", &draft_workspace_bytes, nb::arg("dims"), nb::arg("slots"), nb::arg("batch"),
        nb::arg("fed"), "Size of the draft call's workspace on a GPU.");
  m.def("api_version", [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
}
