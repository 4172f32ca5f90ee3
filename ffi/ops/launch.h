// What every op's launch function shares: an opaque stream (null on the CPU), memory for one call, and a status that
// crosses no exception.
#pragma once

#include <cstdint>
#include <string>

namespace muse {

using Stream = void*;

struct Status {
  std::string message;  // empty: success
  bool ok() const { return message.empty(); }
};

// Device memory that lives until the kernels of one call have run. Ops on the CPU use the heap and take null.
class Scratch {
 public:
  virtual void* allocate(int64_t bytes) = 0;  // 16-byte aligned; null where there is none left

 protected:
  ~Scratch() = default;
};

}  // namespace muse
