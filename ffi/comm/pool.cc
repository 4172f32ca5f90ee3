#include "ffi/comm/pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "ffi/numerics/ieee_mode.h"

namespace muse {
namespace {

// One parallel_for. Threads take indices until none is left; the caller waits only for indices already taken.
struct Job {
  explicit Job(int64_t count, const std::function<void(int64_t)>& body) : count(count), body(&body) {}

  void work() {
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
      try {
        (*body)(i);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (!failure) failure = std::current_exception();
      }
      if (done.fetch_add(1) + 1 == count) {
        const std::lock_guard<std::mutex> lock(mutex);
        finished.notify_all();
      }
    }
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    finished.wait(lock, [this] { return done.load() == count; });
    if (failure) std::rethrow_exception(failure);
  }

  const int64_t count;
  const std::function<void(int64_t)>* body;
  std::atomic<int64_t> next{0}, done{0};
  std::mutex mutex;
  std::condition_variable finished;
  std::exception_ptr failure;
};

class Pool {
 public:
  // Never destroyed: workers may still sleep here while the process exits.
  static Pool& get() {
    static Pool* pool = new Pool;
    return *pool;
  }

  void run(int64_t count, const std::function<void(int64_t)>& body) {
    const auto job = std::make_shared<Job>(count, body);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (int64_t i = 0; i < std::min<int64_t>(workers_, count - 1); ++i) jobs_.push_back(job);
    }
    wake_.notify_all();
    job->work();
    job->wait();
  }

  int workers() const { return workers_; }

 private:
  Pool() : workers_(std::max(1u, std::thread::hardware_concurrency()) - 1) {
    for (int i = 0; i < workers_; ++i) std::thread([this] { loop(); }).detach();
  }

  void loop() {
    const IeeeMode mode;  // a new thread inherits its creator's mode, and XLA's threads flush subnormals
    for (;;) {
      std::shared_ptr<Job> job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [this] { return !jobs_.empty(); });
        job = std::move(jobs_.front());
        jobs_.pop_front();
      }
      job->work();  // a job that is already finished hands out no index and never touches its body
    }
  }

  const int workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Job>> jobs_;
};

// Threads for run_detached: as many as tasks ever ran at once.
class Detached {
 public:
  static Detached& get() {
    static Detached* detached = new Detached;  // never destroyed, like Pool
    return *detached;
  }

  void run(std::function<void()> task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    if (idle_ >= static_cast<int64_t>(tasks_.size()))
      wake_.notify_one();
    else
      std::thread([this] { loop(); }).detach();
  }

 private:
  void loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      while (tasks_.empty()) {
        ++idle_;
        wake_.wait(lock);
        --idle_;
      }
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  int64_t idle_ = 0;
};

}  // namespace

void run_detached(std::function<void()> task) { Detached::get().run(std::move(task)); }

void parallel_for(int64_t count, const std::function<void(int64_t)>& body) {
  if (count <= 0) return;
  if (count == 1 || Pool::get().workers() == 0) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  Pool::get().run(count, body);
}

}  // namespace muse
