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

Launch copy_blocks_node(const LmiCopyBlocks& given);
Launch embed_node(const LmiGatherRows& given);
Launch gather_logit_rows_node(const LmiGatherRows& given);
Launch rms_norm_node(const LmiRmsNorm& given, int32_t rows);
Launch gated_activation_node(const LmiGatedActivation& given, int32_t rows);
Launch rope_cache_write_node(const LmiRopeCacheWrite& given);
// `shape_id`: among the step's attention work.
Launch attention_node(const LmiAttention& given, size_t shape_id);
Launch linear_node(const LmiLinearDense& given, int32_t rows);
Launch linear_packed_node(const LmiLinearPacked& given, int32_t rows);
Launch quantize_rows_node(const LmiQuantizeRows& given, int32_t rows);
Launch linear_quantized_node(const LmiLinearQuantized& given, int32_t rows);

}  // namespace lmi::cuda
