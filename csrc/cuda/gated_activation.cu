// Gated activations: elementwise, bound by memory.
#include "cuda/launch.cuh"

namespace lmi::cuda {
namespace {

constexpr int kThreads = 256;

// x / (1 + exp(-x)); of a large negative x, where exp overflows, 0.
__device__ inline float silu(float x) { return x / (1.0f + exp_of(-x)); }

__device__ inline float gelu_tanh(float x) {
  constexpr float kSqrt2OverPi = 0.7978845608028654f;
  return 0.5f * x * (1.0f + tanh_of(kSqrt2OverPi * (x + 0.044715f * x * x * x)));
}

template <typename T, int kWidth, bool kIsSilu>
__global__ void gated_activation_kernel(const LmiGatedActivation args) {
  const int column = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
  if (column >= args.num_columns) return;
  const int64_t row = blockIdx.x;
  const float* source = args.gate_up + row * 2 * args.num_columns + column;
  float gate[kWidth];
  float up[kWidth];
  load_floats(source, gate);
  load_floats(source + args.num_columns, up);
  for (int i = 0; i < kWidth; ++i) {
    gate[i] = (kIsSilu ? silu(gate[i]) : gelu_tanh(gate[i])) * up[i];
  }
  store_as(static_cast<T*>(args.y) + row * args.num_columns + column, gate);
}

}  // namespace
}  // namespace lmi::cuda

using namespace lmi::cuda;

int32_t lmi_cuda_gated_activation(const LmiGatedActivation* args, void* stream) {
  if (args->activation != LMI_SILU && args->activation != LMI_GELU_TANH) {
    return fail("gated_activation: activation " + std::to_string(args->activation) +
                "; known are 0 (silu), 1 (gelu_tanh)");
  }
  const bool is_wide =
      args->num_columns % 4 == 0 && is_aligned(args->gate_up) && is_aligned(args->y);
  const int width = is_wide ? 4 : 1;
  const Grid grid = {args->num_rows, ceil_div(args->num_columns, kThreads * width)};
  return with_dtype("gated_activation", args->y_dtype, [&](auto element) {
    return with_bool(args->activation == LMI_SILU, [&](auto is_silu) {
      using T = decltype(element);
      constexpr bool kIsSilu = decltype(is_silu)::value;
      const auto kernel =
          is_wide ? gated_activation_kernel<T, 4, kIsSilu> : gated_activation_kernel<T, 1, kIsSilu>;
      return launch("gated_activation", kernel, grid, kThreads, 0, stream, *args);
    });
  });
}
