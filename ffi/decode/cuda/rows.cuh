// The rows of one step on the device, resolved by every block for itself (docs/architecture.md, "Rows"); the same rules
// as ffi/decode/cpu/rows.cc.
#pragma once

#include "ffi/decode/cuda/block.cuh"
#include "ffi/decode/step.h"

namespace muse {

struct DeviceRows {
  int32_t count;          // active rows; the arrays below hold only these, in operand order
  int32_t bad;            // 1 + the first row that breaks a rule, 0 when all are right
  int16_t row[kMaxRows];  // index in the operands
  int32_t token[kMaxRows], sequence[kMaxRows], position[kMaxRows], committed[kMaxRows];
  uint8_t index[kMaxRows];           // among the sequence's rows: K and V go to slot position committed + index
  uint8_t path[kMaxRows][kMaxRows];  // path[i][d]: index of the in-flight row at position committed + d that row i sees
};

// By all computing threads of a block (at least kMaxRows); `rows` is shared memory.
inline __device__ __noinline__ void resolve_rows(const Plan& plan, const SharedPointers& shared, DeviceRows& rows) {
  const int t = thread_index(), total = static_cast<int>(plan.rows);
  __shared__ uint8_t compact[kMaxRows], index_of[kMaxRows];
  if (t == 0) {
    int count = 0;
    for (int u = 0; u < total; ++u) {
      compact[u] = static_cast<uint8_t>(count);
      count += shared.sequence[u] != -1;
    }
    rows.count = count;
    rows.bad = 0;
  }
  sync_block();
  const int32_t sequence = t < total ? shared.sequence[t] : -1;
  const bool active = sequence != -1, known = active && sequence >= 0 && sequence < plan.sequences;
  bool right = !active || known;
  int index = 0;
  if (active) {
    for (int u = 0; u < t; ++u) index += shared.sequence[u] == sequence;
    const int i = compact[t];
    rows.row[i] = static_cast<int16_t>(t);
    rows.token[i] = shared.token[t];
    rows.sequence[i] = sequence;
    rows.position[i] = shared.position[t];
    rows.committed[i] = known ? shared.lengths[sequence] : 0;
    rows.index[i] = static_cast<uint8_t>(index);
    index_of[t] = static_cast<uint8_t>(index);
    const int64_t committed = rows.committed[i], depth = rows.position[i] - committed;
    right = right && rows.token[i] >= 0 && rows.token[i] < plan.vocab && committed >= 0 &&
            committed + index < plan.capacity && rows.position[i] < plan.capacity && depth >= 0 && depth < kMaxRows;
  }
  sync_block();
  if (active && right) {
    const int i = compact[t];
    const int length = rows.position[i] - rows.committed[i] + 1;
    uint64_t seen = 0;
    for (int u = 0; u < total; ++u) {
      if (!shared.ancestors[static_cast<int64_t>(t) * total + u]) continue;
      const int depth = shared.position[u] - rows.committed[i];
      if (shared.sequence[u] != sequence || depth < 0 || depth >= length || (seen >> depth & 1u)) {
        right = false;
        break;
      }
      seen |= uint64_t{1} << depth;
      rows.path[i][depth] = index_of[u];
    }
    const uint64_t all = length == 64 ? ~uint64_t{0} : (uint64_t{1} << length) - 1;
    right = right && seen == all && rows.path[i][length - 1] == index;
  }
  if (!right) atomicCAS(&rows.bad, 0, t + 1);
  sync_block();
}

}  // namespace muse
