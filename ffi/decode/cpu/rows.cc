#include "ffi/decode/cpu/rows.h"

#include <algorithm>
#include <string>

namespace muse {
namespace {

std::string at(const char* name, int64_t row, int64_t value, const std::string& allowed) {
  return "decode: " + std::string(name) + "[" + std::to_string(row) + "] is " + std::to_string(value) +
         ", allowed: " + allowed;
}

std::string span(int64_t low, int64_t high) { return std::to_string(low) + " to " + std::to_string(high); }

// The ancestors of a row must be exactly one row per position from `committed` to its own.
Status resolve_path(const Plan& plan, const SharedPointers& shared, const std::vector<int64_t>& write, ActiveRow* row) {
  const bool* visible = shared.ancestors + row->row * plan.rows;
  row->path.assign(row->position - row->committed + 1, -1);
  for (int64_t u = 0; u < plan.rows; ++u) {
    if (!visible[u]) continue;
    if (shared.sequence[u] != row->sequence)
      return {"decode: ancestors[" + std::to_string(row->row) + ", " + std::to_string(u) + "] is set, but row " +
              std::to_string(u) + " belongs to sequence " + std::to_string(shared.sequence[u]) + ", not " +
              std::to_string(row->sequence)};
    const int64_t depth = shared.position[u] - row->committed;
    if (depth < 0 || depth >= static_cast<int64_t>(row->path.size()) || row->path[depth] >= 0)
      return {"decode: row " + std::to_string(u) + " at position " + std::to_string(shared.position[u]) +
              " is not on a path to row " + std::to_string(row->row) + " at position " + std::to_string(row->position) +
              "; ancestors hold one row for every position from the committed length " +
              std::to_string(row->committed) + " to the row's own"};
    row->path[depth] = write[u];
  }
  for (size_t d = 0; d < row->path.size(); ++d)
    if (row->path[d] < 0)
      return {
          "decode: row " + std::to_string(row->row) + " has no ancestor at position " +
          std::to_string(row->committed + static_cast<int64_t>(d)) +
          "; ancestors hold one row for every position from the committed length to the row's own, itself included"};
  if (row->path.back() != row->write) return {"decode: row " + std::to_string(row->row) + " must be its own ancestor"};
  return {};
}

}  // namespace

Status resolve_rows(const Plan& plan, const SharedPointers& shared, std::vector<ActiveRow>* rows) {
  std::vector<int64_t> used(plan.sequences, 0), write(plan.rows, -1);
  for (int64_t b = 0; b < plan.sequences; ++b)
    if (shared.lengths[b] < 0 || shared.lengths[b] > plan.capacity)
      return {at("lengths", b, shared.lengths[b], span(0, plan.capacity))};
  for (int64_t t = 0; t < plan.rows; ++t) {
    const int32_t sequence = shared.sequence[t];
    if (sequence == -1) continue;
    if (sequence < -1 || sequence >= plan.sequences)
      return {at("sequence", t, sequence, "-1 (inactive) or " + span(0, plan.sequences - 1))};
    if (shared.token[t] < 0 || shared.token[t] >= plan.vocab)
      return {at("token", t, shared.token[t], span(0, plan.vocab - 1))};
    ActiveRow row;
    row.row = t;
    row.token = shared.token[t];
    row.sequence = sequence;
    row.position = shared.position[t];
    row.committed = shared.lengths[sequence];
    row.write = write[t] = row.committed + used[sequence]++;
    if (row.write >= plan.capacity || row.position >= plan.capacity)
      return {"decode: sequence " + std::to_string(sequence) + " needs position " +
              std::to_string(std::max(row.write, row.position)) + ", but its cache holds " +
              std::to_string(plan.capacity) + " (capacity); make the state with a larger capacity"};
    if (row.position < row.committed || row.position - row.committed >= kMaxRows)
      return {at("position", t, row.position,
                 span(row.committed, row.committed + kMaxRows - 1) + " (the committed length and at most 63 beyond)")};
    rows->push_back(std::move(row));
  }
  for (ActiveRow& row : *rows) {
    const Status status = resolve_path(plan, shared, write, &row);
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace muse
