// What every op's launch function shares: an opaque stream (null on the CPU) and a status that crosses no exception.
#pragma once

#include <cstdint>
#include <string>

namespace muse {

using Stream = void*;

struct Status {
  std::string message;  // empty: success
  bool ok() const { return message.empty(); }
};

}  // namespace muse
