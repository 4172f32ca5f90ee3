// Operands and results of handlers that take many of them.
#pragma once

#include "ffi/bindings/handler.h"

namespace muse::bindings {

// Reads operands or results in order, checking type and shape.
template <typename Source>
class Reader {
 public:
  Reader(const Source& source, Check* check) : source_(source), check_(check) {}

  template <typename T>
  T* next(const char* name, ffi::DataType type, std::initializer_list<int64_t> shape) {
    const size_t at = index_++;
    if (!check_->ok()) return nullptr;
    auto buffer = fetch(at);
    if (!buffer.has_value()) {
      check_->that(false, std::string(name) + " is missing (operand or result " + std::to_string(at) + ")");
      return nullptr;
    }
    check_->that(buffer->element_type() == type, std::string(name) + " has the wrong element type")
        .shape(name, *buffer, shape);
    return static_cast<T*>(buffer->untyped_data());
  }

  ffi::Span<const int64_t> peek(size_t at) {
    auto buffer = fetch(at);
    return buffer.has_value() ? buffer->dimensions() : ffi::Span<const int64_t>();
  }

 private:
  std::optional<ffi::AnyBuffer> fetch(size_t at);
  const Source& source_;
  Check* check_;
  size_t index_ = 0;
};

template <>
inline std::optional<ffi::AnyBuffer> Reader<ffi::RemainingArgs>::fetch(size_t at) {
  const auto buffer = source_.get<ffi::AnyBuffer>(at);
  return buffer.has_value() ? std::optional<ffi::AnyBuffer>(*buffer) : std::nullopt;
}

template <>
inline std::optional<ffi::AnyBuffer> Reader<ffi::RemainingRets>::fetch(size_t at) {
  auto buffer = source_.get<ffi::AnyBuffer>(at);
  return buffer.has_value() ? std::optional<ffi::AnyBuffer>(**buffer) : std::nullopt;
}

}  // namespace muse::bindings
