// The rows of one step, checked and resolved: who is active, where its K and V go, which in-flight rows it sees.
#pragma once

#include <vector>

#include "ffi/decode/step.h"

namespace muse {

struct ActiveRow {
  int64_t row;  // index in the call's operands
  int32_t token, sequence;
  int64_t position;
  int64_t committed;  // positions below are in the cache already
  int64_t write;      // slot position of its K and V: committed + index among the sequence's rows
  // path[d]: slot position of the in-flight row that stands at position committed + d for this row; the last is itself.
  std::vector<int64_t> path;
};

// Fills `rows` with the active rows in operand order.
Status resolve_rows(const Plan& plan, const SharedPointers& shared, std::vector<ActiveRow>* rows);

}  // namespace muse
