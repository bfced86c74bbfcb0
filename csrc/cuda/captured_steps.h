// Which decode steps are captured, and what was: one graph per number of rows and longest context,
// and another for steps with adapters.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/step_list.h"

namespace lmi::cuda {

struct StepShape {
  int32_t num_rows = 0;
  int32_t num_keys = 0;
  bool has_adapters = false;  // of some rows

  bool operator<(const StepShape& other) const {  // nvcc compiles C++17
    return std::tie(num_rows, num_keys, has_adapters) <
           std::tie(other.num_rows, other.num_keys, other.has_adapters);
  }
};

class CapturedSteps {
 public:
  explicit CapturedSteps(const LmiStepSizes& sizes)
      : row_counts_(sizes.row_counts, sizes.row_counts + sizes.num_row_counts),
        key_counts_(sizes.key_counts, sizes.key_counts + sizes.num_key_counts),
        num_misses_(sizes.num_misses) {}

  // The smallest shape that a step fits; false if it has none: prompts, copies, too many rows.
  bool find_shape(const LmiStep& step, StepShape& shape) const {
    if (row_counts_.empty() || key_counts_.empty() || has_failed_) return false;
    const int32_t num_rows = step.num_tokens;
    if (num_rows == 0 || step.num_seqs != num_rows || step.num_logit_rows != num_rows ||
        step.num_copies > 0) {
      return false;
    }
    const int32_t longest = *std::max_element(step.kv_lengths, step.kv_lengths + num_rows);
    const auto rows = std::lower_bound(row_counts_.begin(), row_counts_.end(), num_rows);
    const auto keys = std::lower_bound(key_counts_.begin(), key_counts_.end(), longest);
    if (rows == row_counts_.end() || keys == key_counts_.end()) return false;
    shape = {*rows, *keys, step.num_adapter_runs > 0};
    return true;
  }

  void* find(StepShape shape) const {
    const auto found = graphs_.find(shape);
    return found == graphs_.end() ? nullptr : found->second;
  }

  // Whether a shape without a graph was wanted often enough to be captured at once.
  bool miss(StepShape shape) { return ++misses_[shape] >= num_misses_; }

  bool has_wanted() const { return !misses_.empty(); }
  StepShape most_wanted() const {
    return std::max_element(misses_.begin(), misses_.end(),
                            [](const auto& a, const auto& b) { return a.second < b.second; })
        ->first;
  }

  // The graph that was there before, if any, is the caller's.
  void* put(StepShape shape, void* graph) {
    misses_.erase(shape);
    void* before = std::exchange(graphs_[shape], graph);
    num_captured_ = static_cast<int64_t>(graphs_.size());
    return before;
  }
  // Steps are launched kernel by kernel from now on; what was captured stays unused.
  void give_up(const std::string& reason) {
    misses_.clear();
    if (has_failed_) return;
    error_ = reason;
    has_failed_ = true;
  }
  // Why, or ""; from any thread.
  const char* error() const { return has_failed_ ? error_.c_str() : ""; }
  // From any thread.
  int64_t num_captured() const { return num_captured_; }

  StepShape shape(int32_t row_count_id, int32_t key_count_id) const {
    return {row_counts_.at(static_cast<size_t>(row_count_id)),
            key_counts_.at(static_cast<size_t>(key_count_id))};
  }
  const std::vector<int32_t>& row_counts() const { return row_counts_; }
  const std::vector<int32_t>& key_counts() const { return key_counts_; }
  const std::map<StepShape, void*>& graphs() const { return graphs_; }

 private:
  std::vector<int32_t> row_counts_;
  std::vector<int32_t> key_counts_;
  int32_t num_misses_;
  std::map<StepShape, void*> graphs_;
  std::map<StepShape, int32_t> misses_;
  std::atomic<int64_t> num_captured_{0};
  std::atomic<bool> has_failed_{false};
  std::string error_;  // does not change once that is set
};

}  // namespace lmi::cuda
