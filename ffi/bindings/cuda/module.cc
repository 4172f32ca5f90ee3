// The Python module of the CUDA backend. The handlers are the CPU module's files compiled against the CUDA kernels.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "ffi/bindings/registry.h"

namespace nb = nanobind;
using namespace muse::bindings;

NB_MODULE(_cuda, m) {
  m.doc() = "XLA FFI handlers of muse-jax for the CUDA backend.";
  m.def(
      "handlers",
      [] {
        nb::dict result;
        for (const auto& list : {gemm_handlers(), norm_handlers(), attention_handlers(), expert_handlers(),
                                 head_handlers(), numerics_handlers()})
          for (const auto& [name, handler] : list) result[name.c_str()] = nb::capsule(reinterpret_cast<void*>(handler));
        return result;
      },
      "Target name -> capsule, for jax.ffi.register_ffi_target.");
  m.def("architectures", [] { return std::string(MUSE_CUDA_ARCHITECTURES); });
}
