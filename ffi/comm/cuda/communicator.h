// What eight ranks share on GPUs: symmetric workspaces, peer access, preloaded kernels, reports. Built before the first
// step, because allocating or loading while a peer spins deadlocks; calls refer to it by a small integer. Ranks may
// live in several processes of one host: each process allocates its own, exports handles, and opens the others'.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "ffi/decode/cuda/launches.h"
#include "ffi/ops/launch.h"

namespace muse {

class Communicator {
 public:
  // device_of_rank: local device ordinals, -1 for a rank of another process. The plan sizes the workspaces (its step
  // part is not used). loopback, for benchmarks: the one local rank plays its seven peers.
  static Status create(const std::array<int, kRanks>& device_of_rank, const Plan& plan, bool loopback, int64_t* key);
  static Status destroy(int64_t key);
  static std::shared_ptr<Communicator> find(int64_t key);  // null: no such communicator
  // Whether a device can reach another's memory, which ranks on both need. Makes no CUDA context.
  static Status can_reach(int device, int peer, bool* can);

  ~Communicator();

  using Handles = std::array<std::array<char, 64>, kRanks>;  // cudaIpcMemHandle_t by rank
  Status export_handles(Handles* handles) const;             // fills the entries of this process's ranks
  Status connect(const Handles& handles);                    // opens the workspaces of the other processes' ranks

  // Ranks that live on a device, ascending.
  std::vector<int32_t> ranks_of(int device) const;
  unsigned char* workspace(int rank) const { return workspace_[rank]; }
  Report* report(int rank) const { return device_report_ + rank; }
  int64_t workspace_bytes() const { return bytes_; }
  const Prepared& layers(int device) const { return layers_[device]; }
  const Prepared& head(int device) const { return head_[device]; }
  bool loopback() const { return loopback_; }
  // Empty while all is well; afterwards what was waited for. A communicator that gave up stays broken.
  std::string failure() const;
#ifdef MUSE_TIMELINE
  Status timeline(int rank, uint64_t* events);  // copies a local rank's stamps and clears them
#endif

 private:
  Communicator() = default;
  Status build(const std::array<int, kRanks>& device_of_rank, const Plan& plan, bool loopback);

  std::array<int, kRanks> device_of_rank_{};
  std::array<unsigned char*, kRanks> workspace_{};
  Report* host_report_ = nullptr;    // mapped host memory, one per rank
  Report* device_report_ = nullptr;  // the same memory as devices address it
  int64_t bytes_ = 0, timeline_ = 0;
  bool loopback_ = false;
  std::array<Prepared, 64> layers_{}, head_{};  // by device ordinal
};

}  // namespace muse
