// Sampling at the end of a step: what it asks for goes up, tokens come down.
#pragma once

#include <cstdint>

#include "cuda/step_inputs.h"
#include "cuda/step_memory.h"

namespace lmi::cuda {

// Behind one another, for one download.
struct Results {
  int32_t* token_ids;
  float* logprobs;
  int32_t* num_top;
  int32_t* target_ranks;
  int32_t* top_ids;
  float* top_logprobs;

  Results(void* memory, int64_t num_rows, int64_t max_top);
  static int64_t num_bytes(int64_t num_rows, int64_t max_top) {
    return 4 * num_rows * (4 + 2 * max_top);
  }
};

class StepSampler {
 public:
  // `args` lacks all that a step says.
  void set(const LmiSample& args);
  bool is_set() const { return args_.logits != nullptr; }

  // Samples the step's rows into `results` on the device. What changes logits, where there is
  // anything, goes up through `edits` once it is known.
  int32_t launch(const LmiStep& step, const StepInputs& inputs, void* results, GrowingUpload& edits,
                 void* stream) const;

 private:
  int32_t upload_edits(const LmiStepEdits& wanted, GrowingUpload& edits, void* stream,
                       LmiSample& args) const;

  LmiSample args_ = {};
};

}  // namespace lmi::cuda
