// Nodes of the step list: kernels' arguments, completed by what a step says and launched.
#pragma once

#include <cstdint>
#include <functional>

#include "cuda/step_inputs.h"

namespace lmi::cuda {

// A step as nodes see it: counts, and arrays on the device.
struct StepContext {
  const StepCounts& counts;
  const StepInputs& inputs;
  int32_t block_size;
  float* partials;
  float* log_masses;

  int32_t num_rows(int32_t symbol) const {
    return symbol == LMI_TOKEN_ROWS ? counts.num_tokens : counts.num_logit_rows;
  }
};

using Launch = std::function<int32_t(const StepContext& step, void* stream)>;

// A kernel that wants nothing of a step but how many rows it has.
template <typename Args>
Launch row_node(const Args& given, int32_t rows, int32_t (*launch)(const Args*, void*)) {
  return [given, rows, launch](const StepContext& step, void* stream) {
    Args args = given;
    args.num_rows = step.num_rows(rows);
    return launch(&args, stream);
  };
}

Launch copy_blocks_node(const LmiCopyBlocks& given);
// By the token ids, or, for logit rows, by the token rows that they are of.
Launch gather_node(const LmiGatherRows& given, int32_t rows);
Launch rope_cache_write_node(const LmiRopeCacheWrite& given);
// `shape_id`: among the step's attention work.
Launch attention_node(const LmiAttention& given, size_t shape_id);
Launch linear_node(const LmiLinearDense& given, int32_t rows);

// Choose how so many rows are multiplied, where that is a choice.
int32_t prepare_linear(const LmiLinearDense& given, int32_t num_rows);
int32_t prepare_linear_packed(const LmiLinearPacked& given, int32_t num_rows);

}  // namespace lmi::cuda
