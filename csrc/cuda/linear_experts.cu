// Dense products of each row with its own expert's matrix: which kernel makes them.
#include "cuda/linear_experts.cuh"

#include "cuda/launch.cuh"

using namespace lmi::cuda;

int32_t lmi_cuda_linear_experts(const LmiLinearExperts* args, void* stream) {
  if (args->num_inputs % 8 != 0 || !is_aligned(args->x)) {
    return fail("linear_experts: rows of " + std::to_string(args->num_inputs) +
                " inputs; multiples of 8 that start on 16 bytes can be had");
  }
  if (const int32_t status = check_bf16("linear_experts", args->dtype)) return status;
  const bool is_few =
      args->in_tiles == 0 && args->num_rows <= int64_t{kFewExpertRows} * args->num_experts;
  return is_few ? launch_few_expert_rows(*args, stream) : launch_expert_tiles(*args, stream);
}
