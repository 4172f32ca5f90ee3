// The Python module of the CUDA backend. The handlers are the CPU module's files compiled against the CUDA kernels.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>
#include <vector>

#include "ffi/bindings/registry.h"
#include "ffi/comm/cuda/communicator.h"

namespace nb = nanobind;
using namespace muse::bindings;

namespace {

void raise_if(const muse::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message);
}

// sizes: hidden, query heads, kv heads, MoE hidden, MoE inner, experts, experts per token, vocabulary.
int64_t create_communicator(const std::array<int, muse::kRanks>& device_of_rank, const std::array<int64_t, 8>& sizes,
                            bool loopback) {
  muse::Plan plan{};
  plan.hidden = sizes[0], plan.q_heads = sizes[1], plan.kv_heads = sizes[2], plan.moe_hidden = sizes[3];
  plan.moe_inner = sizes[4], plan.experts = sizes[5], plan.top_k = sizes[6], plan.vocab = sizes[7];
  int64_t key = 0;
  const nb::gil_scoped_release release;
  raise_if(muse::Communicator::create(device_of_rank, plan, loopback, &key));
  return key;
}

std::shared_ptr<muse::Communicator> open_communicator(int64_t key) {
  auto communicator = muse::Communicator::find(key);
  if (!communicator) throw std::runtime_error("communicator " + std::to_string(key) + " is closed");
  return communicator;
}

// 8 x 64 bytes; those of other processes' ranks are zeros.
nb::bytes export_handles(int64_t key) {
  muse::Communicator::Handles handles{};
  raise_if(open_communicator(key)->export_handles(&handles));
  return nb::bytes(handles[0].data(), sizeof(handles));
}

void connect_communicator(int64_t key, const nb::bytes& bytes) {
  muse::Communicator::Handles handles{};
  if (bytes.size() != sizeof(handles)) throw std::runtime_error("connect_communicator needs 8 handles of 64 bytes");
  memcpy(handles[0].data(), bytes.c_str(), sizeof(handles));
  raise_if(open_communicator(key)->connect(handles));
}

std::vector<std::vector<bool>> peer_access(const std::vector<int>& ordinals) {
  std::vector<std::vector<bool>> reach(ordinals.size(), std::vector<bool>(ordinals.size(), true));
  for (size_t i = 0; i < ordinals.size(); ++i) {
    for (size_t j = 0; j < ordinals.size(); ++j) {
      if (i == j) continue;
      bool can = false;
      raise_if(muse::Communicator::can_reach(ordinals[i], ordinals[j], &can));
      reach[i][j] = can;
    }
  }
  return reach;
}

std::string communicator_failure(int64_t key) { return open_communicator(key)->failure(); }

}  // namespace

#if defined(MUSE_SIMULATOR)
NB_MODULE(_simulated, m) {
#else
NB_MODULE(_cuda, m) {
#endif
  m.doc() = "XLA FFI handlers of muse-jax for the CUDA backend.";
  m.def(
      "handlers",
      [] {
        nb::dict result;
        for (const auto& list : {
#if !defined(MUSE_SIMULATOR)  // which has the fused calls alone
                 gemm_handlers(), norm_handlers(), attention_handlers(), expert_handlers(), head_handlers(),
                 numerics_handlers(),
#endif
                 decode_handlers(), draft_handlers(), accept_handlers()})
          for (const auto& [name, handler] : list) result[name.c_str()] = nb::capsule(reinterpret_cast<void*>(handler));
        return result;
      },
      "Target name -> capsule, for jax.ffi.register_ffi_target.");
  m.def("create_communicator", &create_communicator, nb::arg("device_of_rank"), nb::arg("sizes"),
        nb::arg("loopback") = false,
        "Allocate and preload everything for the ranks on these local devices (-1: another process); returns the key. "
        "loopback, for benchmarks: the one rank that is here plays all its peers.");
  m.def(
      "destroy_communicator",
      [](int64_t key) {
        const nb::gil_scoped_release release;
        raise_if(muse::Communicator::destroy(key));
      },
      nb::arg("key"), "Free a communicator once no step uses it.");
  m.def("export_handles", &export_handles, nb::arg("key"), "CUDA IPC handles of this process's workspaces.");
  m.def("connect_communicator", &connect_communicator, nb::arg("key"), nb::arg("handles"),
        "Open the workspaces of other processes' ranks.");
  m.def("communicator_failure", &communicator_failure, nb::arg("key"),
        "Empty, or which rank waited where for whom when a step gave up.");
  m.def("peer_access", &peer_access, nb::arg("ordinals"),
        "[i][j]: whether the i-th of these local devices can reach the memory of the j-th.");
#ifdef MUSE_TIMELINE
  m.def(
      "timeline",
      [](int64_t key, int rank) {
        std::vector<uint64_t> events(muse::kTimelineBlocks * muse::kTimelineEvents);
        raise_if(open_communicator(key)->timeline(rank, events.data()));
        return nb::bytes(reinterpret_cast<const char*>(events.data()), events.size() * sizeof(uint64_t));
      },
      nb::arg("key"), nb::arg("rank"), "Stamps of the last launch, uint64 [blocks, events], and zeros the rest.");
#endif
  m.def(
      "architectures", [] { return std::string(MUSE_CUDA_ARCHITECTURES); },
      "GPU architectures of this build as CMake names them, with commas between.");
}
