// The list of handlers that the nanobind module hands to Python.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace muse::bindings {

using HandlerList = std::vector<std::pair<std::string, XLA_FFI_Handler*>>;

// Each returns its file's handlers under their target names.
HandlerList gemm_handlers();
HandlerList norm_handlers();
HandlerList attention_handlers();
HandlerList expert_handlers();
HandlerList head_handlers();
HandlerList numerics_handlers();
HandlerList decode_handlers();
HandlerList draft_handlers();
HandlerList accept_handlers();

}  // namespace muse::bindings
