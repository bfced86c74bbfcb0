// Steps made ready for the device: sized, padded to a captured shape, and laid out.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/captured_steps.h"
#include "cuda/step_inputs.h"

namespace lmi::cuda {

struct SizedStep {
  std::vector<int32_t> num_rows;  // of each sequence and of the free rows
  std::vector<int32_t> kv_lengths;
  std::vector<AttentionLists> lists;
  std::vector<LmiLoraTile> lora_tiles;
  StepCounts counts;
};

class StepPacker {
 public:
  explicit StepPacker(const LmiStepSizes& sizes) : sizes_(sizes) {}

  // The number of the shape among a step's attention work.
  size_t add_attention(const AttentionShape& shape);
  // Steps may have adapters from now on.
  void add_adapters() { adapters_.resize(LMI_MAX_ADAPTERS); }
  int32_t set_adapter(int32_t slot, uint64_t parts);

  const LmiStepSizes& sizes() const { return sizes_; }
  StepCounts most() const;
  StepCounts counts_of(StepShape shape) const;
  // Values that the partial results of any step take, and the logarithms of their masses.
  int64_t num_partial_values() const;
  int64_t num_log_masses() const;

  // 0, or an error if the step has more than there is room for.
  int32_t check(const LmiStep& step) const;
  // `shape`: what to pad the step to, unless null.
  SizedStep size(const LmiStep& step, const StepShape* shape) const;
  // Whether attention's work is no more than the counts have room for.
  static bool fits(const SizedStep& sized);
  void fill(const LmiStep& step, const SizedStep& sized, const StepInputs& host) const;

 private:
  int32_t check_adapters(const LmiStep& step) const;
  std::vector<LmiLoraTile> lora_tiles(const LmiStep& step) const;
  void fill_tables(const LmiStep& step, const StepCounts& counts, const StepInputs& host) const;

  LmiStepSizes sizes_;
  std::vector<uint64_t> adapters_;  // by slot; none: the model takes none
  std::vector<AttentionShape> shapes_;
};

}  // namespace lmi::cuda
