#include "ffi/comm/cuda/communicator.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "ffi/decode/cuda/launches.h"

namespace muse {
namespace {

std::mutex registry_mutex;
std::map<int64_t, std::shared_ptr<Communicator>>& registry() {
  static auto* all = new std::map<int64_t, std::shared_ptr<Communicator>>;
  return *all;
}

Status cuda_status(const char* what, cudaError_t error) {
  return error == cudaSuccess ? Status{}
                              : Status{std::string("communicator: ") + what + ": " + cudaGetErrorString(error)};
}

// Restores the caller's device.
class DeviceScope {
 public:
  DeviceScope() { cudaGetDevice(&saved_); }
  ~DeviceScope() { cudaSetDevice(saved_); }

 private:
  int saved_ = 0;
};

const char* phase_name(Phase phase) {
  constexpr const char* kNames[] = {"embedding",       "attention", "o_proj exchange",        "branch all-gather",
                                    "router exchange", "experts",   "expert hidden exchange", "combine",
                                    "end of step",     "head"};
  return kNames[static_cast<uint32_t>(phase)];
}

}  // namespace

Status Communicator::create(const std::array<int, kRanks>& device_of_rank, const Plan& plan, bool loopback,
                            int64_t* key) {
  std::shared_ptr<Communicator> communicator(new Communicator);
  const Status status = communicator->build(device_of_rank, plan, loopback);
  if (!status.ok()) return status;
  static int64_t next_key = 1;
  const std::lock_guard<std::mutex> lock(registry_mutex);
  *key = next_key++;
  registry()[*key] = std::move(communicator);
  return {};
}

Status Communicator::destroy(int64_t key) {
  std::shared_ptr<Communicator> last;
  const std::lock_guard<std::mutex> lock(registry_mutex);
  const auto at = registry().find(key);
  if (at == registry().end()) return {"communicator " + std::to_string(key) + " does not exist or was closed already"};
  last = std::move(at->second);
  registry().erase(at);
  return {};
}

std::shared_ptr<Communicator> Communicator::find(int64_t key) {
  const std::lock_guard<std::mutex> lock(registry_mutex);
  const auto at = registry().find(key);
  return at == registry().end() ? nullptr : at->second;
}

Status Communicator::can_reach(int device, int peer, bool* can) {
  int answer = 0;
  const cudaError_t e = cudaDeviceCanAccessPeer(&answer, device, peer);
  *can = answer != 0;
  return cuda_status("asking for peer access", e);
}

Status Communicator::build(const std::array<int, kRanks>& device_of_rank, const Plan& plan, bool loopback) {
  const DeviceScope scope;
  device_of_rank_ = device_of_rank;
  loopback_ = loopback;
  const Workspace offsets = workspace_of(plan);
  bytes_ = offsets.bytes;
  timeline_ = offsets.timeline;
  std::set<int> devices(device_of_rank.begin(), device_of_rank.end());
  devices.erase(-1);
  cudaError_t e = cudaHostAlloc(reinterpret_cast<void**>(&host_report_), kRanks * sizeof(Report),
                                cudaHostAllocMapped | cudaHostAllocPortable);
  if (e != cudaSuccess) return cuda_status("host memory for reports", e);
  memset(static_cast<void*>(host_report_), 0, kRanks * sizeof(Report));
  if ((e = cudaHostGetDevicePointer(reinterpret_cast<void**>(&device_report_), host_report_, 0)) != cudaSuccess)
    return cuda_status("mapping the reports", e);
  for (const int device : devices) {
    if (device < 0 || device >= static_cast<int>(layers_.size()))
      return {"communicator: device ordinal " + std::to_string(device) + " is not supported"};
    if ((e = cudaSetDevice(device)) != cudaSuccess) return cuda_status("no such device", e);
    for (const int peer : devices) {
      if (peer == device) continue;
      e = cudaDeviceEnablePeerAccess(peer, 0);
      if (e == cudaErrorPeerAccessAlreadyEnabled) cudaGetLastError();
      if (e != cudaSuccess && e != cudaErrorPeerAccessAlreadyEnabled)
        return cuda_status(
            ("device " + std::to_string(device) + " cannot reach the memory of device " + std::to_string(peer)).c_str(),
            e);
    }
    Status status = prepare_layers(plan, &layers_[device]);
    if (status.ok()) status = prepare_head(plan, &head_[device]);
    if (!status.ok()) return status;
    const int ranks = static_cast<int>(ranks_of(device).size()), blocks = layers_[device].blocks;
    if (blocks / ranks < kMinBlocks)
      return {"communicator: device " + std::to_string(device) + " holds " + std::to_string(blocks) +
              " blocks at once, too few for " + std::to_string(ranks) + " ranks of at least " +
              std::to_string(kMinBlocks) + "; use more devices"};
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    if (device_of_rank[rank] < 0) continue;
    if ((e = cudaSetDevice(device_of_rank[rank])) != cudaSuccess) return cuda_status("no such device", e);
    if ((e = cudaMalloc(reinterpret_cast<void**>(&workspace_[rank]), bytes_)) != cudaSuccess)
      return cuda_status(("a rank's workspace of " + std::to_string(bytes_) +
                          " bytes; leave JAX less memory with XLA_PYTHON_CLIENT_MEM_FRACTION")
                             .c_str(),
                         e);
    if ((e = cudaMemset(workspace_[rank], 0, bytes_)) != cudaSuccess) return cuda_status("clearing a workspace", e);
  }
  if (loopback)
    for (int rank = 0; rank < kRanks; ++rank)
      if (device_of_rank[rank] < 0) workspace_[rank] = *std::max_element(workspace_.begin(), workspace_.end());
  for (const int device : devices) {
    if ((e = cudaSetDevice(device)) != cudaSuccess) return cuda_status("no such device", e);
    if ((e = cudaDeviceSynchronize()) != cudaSuccess) return cuda_status("set-up", e);
  }
  return {};
}

Status Communicator::export_handles(Handles* handles) const {
  for (int rank = 0; rank < kRanks; ++rank) {
    if (device_of_rank_[rank] < 0) continue;
    cudaIpcMemHandle_t handle;
    const cudaError_t e = cudaIpcGetMemHandle(&handle, workspace_[rank]);
    if (e != cudaSuccess) return cuda_status("exporting a workspace to other processes", e);
    static_assert(sizeof(handle) == sizeof((*handles)[rank]), "an IPC handle has 64 bytes");
    memcpy((*handles)[rank].data(), &handle, sizeof(handle));
  }
  return {};
}

Status Communicator::connect(const Handles& handles) {
  const DeviceScope scope;
  for (const int device : device_of_rank_) {
    if (device < 0) continue;
    cudaSetDevice(device);
    break;
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    if (device_of_rank_[rank] >= 0) continue;
    cudaIpcMemHandle_t handle;
    memcpy(&handle, handles[rank].data(), sizeof(handle));
    const cudaError_t e =
        cudaIpcOpenMemHandle(reinterpret_cast<void**>(&workspace_[rank]), handle, cudaIpcMemLazyEnablePeerAccess);
    if (e != cudaSuccess)
      return cuda_status(
          ("opening the workspace of rank " + std::to_string(rank) + ", which another process on this host owns")
              .c_str(),
          e);
  }
  return {};
}

Communicator::~Communicator() {
  const DeviceScope scope;
  for (int rank = 0; rank < kRanks; ++rank) {
    if (!workspace_[rank]) continue;
    if (device_of_rank_[rank] < 0) {
      if (loopback_) continue;
      cudaIpcCloseMemHandle(workspace_[rank]);
      continue;
    }
    cudaSetDevice(device_of_rank_[rank]);
    cudaDeviceSynchronize();  // no kernel may still use it
    cudaFree(workspace_[rank]);
  }
  if (host_report_) cudaFreeHost(host_report_);
}

std::vector<int32_t> Communicator::ranks_of(int device) const {
  std::vector<int32_t> ranks;
  for (int rank = 0; rank < kRanks; ++rank)
    if (device_of_rank_[rank] == device) ranks.push_back(rank);
  return ranks;
}

#ifdef MUSE_TIMELINE
Status Communicator::timeline(int rank, uint64_t* events) {
  const DeviceScope scope;
  cudaSetDevice(device_of_rank_[rank]);
  const size_t bytes = kTimelineBlocks * kTimelineEvents * sizeof(uint64_t);
  cudaError_t e = cudaMemcpy(events, workspace_[rank] + timeline_, bytes, cudaMemcpyDeviceToHost);
  if (e == cudaSuccess) e = cudaMemset(workspace_[rank] + timeline_, 0, bytes);
  return cuda_status("reading the timeline", e);
}
#endif

std::string Communicator::failure() const {
  std::string text;
  for (int rank = 0; rank < kRanks; ++rank) {
    const Report& r = host_report_[rank];
    const ReportCode code = r.code;
    if (code == kFine) continue;
    text += (text.empty() ? "" : "; ") + ("rank " + std::to_string(rank));
    if (code == kBadRows)
      text +=
          ": row " + std::to_string(r.source) +
          " of the step has a token, sequence, position or ancestors out of range, or exceeds the capacity (a token of "
          "-1 is what a draft leaves that gave up waiting)";
    else
      text += " waited in layer " + std::to_string(r.layer) + ", " + phase_name(r.phase) + ", for rank " +
              std::to_string(r.source);
  }
  return text;
}

}  // namespace muse
