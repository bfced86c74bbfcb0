// What a step samples, as the device's sample kernel reads it (csrc/cuda/step_list.h).
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/sampling_row.h"
#include "cuda/step_list.h"
#include "graph/step.h"

namespace lmi {

// Of one step, whose view must outlive it. Filled anew for each step, so that memory is kept.
class DeviceSampling {
 public:
  // What is known before the tokens of the step before: all but edits. Valid until the next one's.
  LmiStepSampling gather_rows(const StepView& step);
  // By the sampling table as it is now, once masks are filled. Valid until the next one's.
  const LmiStepEdits* gather_edits(const StepView& step);

 private:
  // Changes of logits, row by row.
  struct Edits {
    std::vector<int32_t> offsets;
    std::vector<int32_t> ids;
    std::vector<float> values;

    void clear();
    void add(int32_t id, float value);
    void end_row() { offsets.push_back(static_cast<int32_t>(ids.size())); }
    LmiEdits view() const { return {offsets.data(), ids.data(), values.data()}; }
  };

  LmiSampleRow row_of(const StepView& step, int32_t logit_row);
  void add_edits(const StepView& step, int32_t logit_row);

  std::vector<LmiSampleRow> rows_;
  LmiStepEdits gathered_ = {};
  Edits biases_;
  Edits seen_;
  Edits bans_;
  std::vector<const uint32_t*> masks_;
  std::vector<int32_t> order_;  // of the vocabulary, by a watermark
};

}  // namespace lmi
