#include "ffi/comm/gang.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>
#include <utility>

#include "ffi/comm/pool.h"

namespace muse {
namespace {

using Clock = std::chrono::steady_clock;

struct Gang {
  std::vector<GangMember> members;
  uint32_t present = 0;  // one bit per rank
  Clock::time_point deadline;
  double limit_seconds = 0;
  std::string what;
};

std::string list_ranks(uint32_t mask) {
  std::string text;
  for (int r = 0; r < kRanks; ++r)
    if (mask >> r & 1u) text += (text.empty() ? "" : ", ") + std::to_string(r);
  return text;
}

class Gangs {
 public:
  // Never destroyed: the watchdog may still sleep here while the process exits.
  static Gangs& get() {
    static Gangs* gangs = new Gangs;
    return *gangs;
  }

  std::vector<GangMember> join(const char* what, const GangKey& key, GangMember member, double limit_seconds) {
    uint32_t mask = 0;
    std::string problem;
    for (const int32_t r : member.ranks) {
      if (r < 0 || r >= kRanks || (mask >> r & 1u))
        problem = "ranks must be distinct and in 0..7, got " + std::to_string(r);
      if (problem.empty()) mask |= 1u << r;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    const auto failure =
        std::find_if(failed_.begin(), failed_.end(), [&](const auto& f) { return f.first == key.run_id; });
    if (failure != failed_.end()) {
      const Status status = failure->second;
      lock.unlock();
      complete_all({std::move(member)}, status);
      return {};
    }
    const auto same_key = gangs_.equal_range(key);
    auto at = std::find_if(same_key.first, same_key.second, [&](const auto& g) { return !(g.second.present & mask); });
    const bool created = at == same_key.second;
    if (created) at = gangs_.emplace(key, Gang());
    Gang& gang = at->second;
    gang.members.push_back(std::move(member));
    gang.present |= mask;
    if (created) {
      gang.what = what;
      gang.limit_seconds = limit_seconds;
      gang.deadline =
          Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(limit_seconds));
      changed_.notify_one();
    }
    if (problem.empty() && gang.present != (1u << kRanks) - 1) return {};
    std::vector<GangMember> members = std::move(gang.members);
    gangs_.erase(at);
    lock.unlock();
    if (problem.empty()) return members;
    const Status status{std::string(what) + ": " + problem};
    fail_run(key.run_id, status);
    complete_all(members, status);
    return {};
  }

  void fail_run(int64_t run_id, const Status& status) {
    std::vector<GangMember> waiting;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      failed_.emplace_back(run_id, status);
      if (failed_.size() > kRemembered) failed_.pop_front();
      const auto first = gangs_.lower_bound({run_id, INT64_MIN, INT64_MIN, 0});
      auto last = first;
      for (; last != gangs_.end() && last->first.run_id == run_id; ++last)
        for (GangMember& member : last->second.members) waiting.push_back(std::move(member));
      gangs_.erase(first, last);
    }
    complete_all(waiting, status);
  }

 private:
  Gangs() {
    std::thread([this] { watch(); }).detach();
  }

  void watch() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      const auto first = std::min_element(gangs_.begin(), gangs_.end(), [](const auto& a, const auto& b) {
        return a.second.deadline < b.second.deadline;
      });
      if (first == gangs_.end()) {
        changed_.wait(lock);
      } else if (Clock::now() < first->second.deadline) {
        changed_.wait_until(lock, Clock::time_point(first->second.deadline));
      } else {
        const int64_t run_id = first->first.run_id;
        const Gang gang = std::move(first->second);
        gangs_.erase(first);
        lock.unlock();
        const uint32_t missing = ~gang.present & ((1u << kRanks) - 1);
        const Status status{gang.what + ": waited " + std::to_string(gang.limit_seconds) + " s, but rank(s) " +
                            list_ranks(missing) +
                            " never joined the step; run it inside shard_map over a mesh that carries all 8 ranks"};
        fail_run(run_id, status);
        complete_all(gang.members, status);
        lock.lock();
      }
    }
  }

  static constexpr size_t kRemembered = 64;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<int64_t, Status>> failed_;  // the newest runs that ended in an error
  std::multimap<GangKey, Gang> gangs_;  // twins under one key do equal work, so it is all the same who meets whom
};

}  // namespace

bool GangKey::operator<(const GangKey& other) const {
  return std::tie(run_id, state_id, epoch, digest) < std::tie(other.run_id, other.state_id, other.epoch, other.digest);
}

void complete_all(const std::vector<GangMember>& members, const Status& status) {
  for (const GangMember& member : members) run_detached([complete = member.complete, status] { complete(status); });
}

std::vector<GangMember> join_gang(const char* what, const GangKey& key, GangMember member, double limit_seconds) {
  return Gangs::get().join(what, key, std::move(member), limit_seconds);
}

void fail_run(int64_t run_id, const Status& status) { Gangs::get().fail_run(run_id, status); }

uint64_t hash_bytes(uint64_t seed, const void* data, size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  for (; bytes > 0;) {
    uint64_t word = 0;
    const size_t n = std::min(bytes, sizeof(word));
    memcpy(&word, p, n);
    seed = (seed ^ word) * 0x100000001B3ull;
    seed ^= seed >> 32;
    p += n, bytes -= n;
  }
  return seed;
}

}  // namespace muse
