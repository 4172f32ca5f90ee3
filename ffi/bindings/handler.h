// What all XLA FFI handlers share: the stream, the IEEE mode, errors that never cross as exceptions, shape checks.
#pragma once

#include <exception>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

#include "ffi/numerics/ieee_mode.h"
#include "ffi/ops/launch.h"
#include "xla/ffi/api/ffi.h"

namespace muse::bindings {

namespace ffi = xla::ffi;

using Bf16 = ffi::Buffer<ffi::BF16>;
using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;
using U8 = ffi::Buffer<ffi::U8>;
using E4m3 = ffi::AnyBuffer;  // the FFI headers have no typed buffer for it; Check::e4m3 tests the type
using Scalar = ffi::BufferR0<ffi::F32>;

inline const uint16_t* bits(const Bf16& buffer) { return reinterpret_cast<const uint16_t*>(buffer.typed_data()); }
inline uint16_t* bits(ffi::Result<Bf16>& buffer) { return reinterpret_cast<uint16_t*>(buffer->typed_data()); }
inline const uint8_t* scale_bits(const E4m3& buffer) { return static_cast<const uint8_t*>(buffer.untyped_data()); }

#if defined(MUSE_CUDA_MODULE) && !defined(MUSE_SIMULATOR)  // the simulator's calls come from XLA's CPU backend
#define MUSE_ON_CUDA
#endif

// Decodes to the CUDA stream, or to null in the CPU module: one handler signature serves both.
struct StreamContext {};

// A handler's memory for its call: from XLA on CUDA, none in the CPU module.
#if defined(MUSE_ON_CUDA)
class CallScratch final : public Scratch {
 public:
  explicit CallScratch(ffi::ScratchAllocator allocator) : allocator_(std::move(allocator)) {}
  void* allocate(int64_t bytes) override {
    return allocator_.Allocate(static_cast<size_t>(bytes), kAlignment).value_or(nullptr);
  }

 private:
  static constexpr size_t kAlignment = 16;  // the most that XLA grants
  ffi::ScratchAllocator allocator_;
};
#else
class CallScratch final : public Scratch {
 public:
  void* allocate(int64_t) override { return nullptr; }
};
#endif

inline ffi::Error invalid(const std::string& message) { return ffi::Error(ffi::ErrorCode::kInvalidArgument, message); }

inline ffi::Error to_error(const Status& status) {
  return status.ok() ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kInternal, status.message);
}

// Runs a handler's body in IEEE mode; an exception (bad_alloc, say) becomes an error.
template <typename Body>
ffi::Error guarded(const char* op, Body body) {
  try {
    const IeeeMode mode;
    return body();
  } catch (const std::exception& e) {
    return ffi::Error(ffi::ErrorCode::kInternal, std::string(op) + ": " + e.what());
  }
}

inline std::string shape_text(ffi::Span<const int64_t> dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + "]";
}

// Collects the first violated expectation of a call; every message names op, operand, given and expected.
class Check {
 public:
  explicit Check(const char* op) : op_(op) {}

  // Buffer is any typed ffi buffer; -1 accepts any extent.
  template <typename Buffer>
  Check& shape(const char* name, const Buffer& buffer, std::initializer_list<int64_t> expected) {
    const auto dims = buffer.dimensions();
    bool same = dims.size() == expected.size();
    size_t i = 0;
    for (const int64_t e : expected) {
      if (!same) break;
      same = e < 0 || dims[i] == e;
      ++i;
    }
    if (!same) {
      std::string want = "[";
      for (const int64_t e : expected) want += (want.size() > 1 ? ", " : "") + (e < 0 ? "any" : std::to_string(e));
      fail(std::string(name) + " has shape " + shape_text(dims) + ", expected " + want + "]");
    }
    return *this;
  }

  template <typename Buffer>
  Check& rank(const char* name, const Buffer& buffer, size_t expected) {
    if (buffer.dimensions().size() != expected)
      fail(std::string(name) + " has shape " + shape_text(buffer.dimensions()) + ", expected " +
           std::to_string(expected) + " dimensions");
    return *this;
  }

  Check& multiple(const char* name, int64_t value, int64_t of) {
    if (value <= 0 || value % of)
      fail(std::string(name) + " is " + std::to_string(value) + ", expected a positive multiple of " +
           std::to_string(of));
    return *this;
  }

  Check& that(bool condition, const std::string& message) {
    if (!condition) fail(message);
    return *this;
  }

  Check& e4m3(const char* name, const E4m3& buffer, std::initializer_list<int64_t> expected) {
    that(buffer.element_type() == ffi::F8E4M3FN, std::string(name) + " must be float8_e4m3fn");
    return shape(name, buffer, expected);
  }

  bool ok() const { return message_.empty(); }
  ffi::Error error() const { return invalid(message_); }

 private:
  void fail(const std::string& message) {
    if (message_.empty()) message_ = std::string(op_) + ": " + message;
  }
  const char* op_;
  std::string message_;
};

}  // namespace muse::bindings

namespace xla::ffi {

template <>
struct CtxDecoding<muse::bindings::StreamContext> {
  using Type = muse::Stream;
#if defined(MUSE_ON_CUDA)
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx,
                                    DiagnosticEngine& diagnostic) {
    return CtxDecoding<PlatformStream<void*>>::Decode(api, ctx, diagnostic);
  }
#else
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*, DiagnosticEngine&) {
    return Type{nullptr};
  }
#endif
};

template <>
struct CtxDecoding<muse::bindings::CallScratch> {
  using Type = muse::bindings::CallScratch;
#if defined(MUSE_ON_CUDA)
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx,
                                    DiagnosticEngine& diagnostic) {
    auto allocator = CtxDecoding<ScratchAllocator>::Decode(api, ctx, diagnostic);
    if (!allocator) return std::nullopt;
    return Type(std::move(*allocator));
  }
#else
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*, DiagnosticEngine&) { return Type{}; }
#endif
};

}  // namespace xla::ffi
