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
  int32_t experts_per_token;
  float* partials;
  float* log_masses;
  int32_t* arrivals;

  int32_t num_rows(int32_t symbol) const {
    if (symbol == LMI_EXPERT_ROWS) return counts.num_tokens * experts_per_token;
    return symbol == LMI_TOKEN_ROWS ? counts.num_tokens : counts.num_logit_rows;
  }
};

using Launch = std::function<int32_t(const StepContext& step, void* stream)>;

// A node that depends on nothing but its arguments and the step; empty if it isn't known.
Launch step_node(int32_t node, int32_t rows, const void* args);
// `shape_id`: among the step's attention work.
Launch attention_node(const LmiAttention& given, size_t shape_id);

// Choose how so many rows are multiplied, where that is a choice.
int32_t prepare_linear(const LmiLinearDense& given, int32_t num_rows);
int32_t prepare_linear_packed(const LmiLinearPacked& given, int32_t num_rows);
int32_t prepare_linear_quantized(const LmiLinearQuantized& given, int32_t num_rows);

}  // namespace lmi::cuda
