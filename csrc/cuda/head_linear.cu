// Dense products of each head's columns with its own matrix: which kernel makes them.
#include "cuda/head_linear.cuh"

#include "cuda/launch.cuh"

using namespace lmi::cuda;

int32_t lmi_cuda_head_linear(const LmiHeadLinear* args, void* stream) {
  if (const int32_t status = check_bf16("head_linear", args->dtype)) return status;
  const bool is_wide = args->num_inputs % 8 == 0 && is_aligned(args->x);
  if (is_wide && args->num_rows <= LMI_MAX_FEW_ROWS) return launch_few_head_rows(*args, stream);
  return launch_head_tiles(*args, is_wide, stream);
}
