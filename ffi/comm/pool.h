// The CPU backend's own worker threads. XLA's intra-op pool may not be waited on from inside a handler, so kernels that
// want all cores bring their own.
#pragma once

#include <cstdint>
#include <functional>

namespace muse {

// Calls body(i) once for every i in [0, count), on the calling thread and any idle workers, and returns when all are
// done. Safe to call from several threads at once and never blocks on work it did not hand out itself. The first
// exception thrown by a body is rethrown here.
void parallel_for(int64_t count, const std::function<void(int64_t)>& body);

// Runs `task` on a thread of its own, reused when idle. For completing XLA's futures: a completion runs whatever waits
// for it, which may block on another device's completion, so no two may share a thread.
void run_detached(std::function<void()> task);

}  // namespace muse
