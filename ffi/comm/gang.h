// Where the devices of one step meet on the CPU backend.
//
// A handler may not block: XLA runs independent calls of different devices in different orders on few threads, and
// blocking barriers deadlock. So each device's call joins a gang and returns a future; the last arrival does the work
// of all ranks and completes everybody. A gang that stays incomplete for its time limit ends in an error that names the
// missing ranks: no wait is unbounded.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ffi/comm/ranks.h"
#include "ffi/ops/launch.h"

namespace muse {

// Calls that belong to the same execution of the same step. One program may step copies of one state independently, in
// any order on each device; so the key holds everything that tells their steps apart and is equal on all devices: the
// state's id and count of calls (the id changes with every call's digest, hence remembers the state's history) and
// `digest`, a hash of this call's replicated operands and attributes.
struct GangKey {
  int64_t run_id;
  int64_t state_id;
  int64_t epoch;
  uint64_t digest;
  bool operator<(const GangKey& other) const;
};

struct GangMember {
  std::vector<int32_t> ranks;
  std::shared_ptr<void> call;                   // the caller's own data
  std::function<void(const Status&)> complete;  // called exactly once, through complete_all
};

// Completes every member, each on a thread of its own (see run_detached).
void complete_all(const std::vector<GangMember>& members, const Status& status);

// Joins; when the members' ranks are all of 0..7, returns them (the caller then works and completes each), otherwise
// nothing. A rank that is present already starts another gang under the same key. Ranks out of range, or twice in one
// member, complete all members of the gang with an error.
std::vector<GangMember> join_gang(const char* what, const GangKey& key, GangMember member, double limit_seconds);

// Ends a run whose step failed: a device that has seen the error makes no further calls, so every gang of the run, now
// or later, gets this status instead of waiting for it.
void fail_run(int64_t run_id, const Status& status);

// FNV-1a over 64-bit words, for GangKey::digest.
uint64_t hash_bytes(uint64_t seed, const void* data, size_t bytes);

}  // namespace muse
