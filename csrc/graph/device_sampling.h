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
  void gather(const StepView& step);
  // Valid until the next gather().
  LmiStepSampling inputs();

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

  void add_row(const StepView& step, int32_t logit_row);
  static void wait_for_masks(void* self);

  const StepView* step_ = nullptr;
  std::vector<LmiSampleRow> rows_;
  Edits biases_;
  Edits seen_;
  Edits bans_;
  std::vector<const uint32_t*> masks_;
  std::vector<int32_t> order_;  // of the vocabulary, by a watermark
  int32_t max_top_ = 0;
};

}  // namespace lmi
