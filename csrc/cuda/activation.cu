// Activations that gated_activation.cu has not, gated or not: elementwise, bound by memory.
#include <cmath>

#include "cuda/activations.cuh"

namespace lmi::cuda {
namespace {

constexpr int kThreads = 256;
// Of the clamped swiglu: y = gate sigmoid(1.702 gate) (up + 1).
constexpr float kClampedLimit = 7.0f;
constexpr float kClampedSlope = 1.702f;

__device__ inline float activated(float x, const LmiActivation& args) {
  switch (args.activation) {
    case LMI_SILU:
      return silu(x);
    case LMI_GELU_TANH:
      return gelu_tanh(x);
    case LMI_GELU:
      return gelu(x);
    case LMI_RELU:
      return relu(x);
    case LMI_RELU2:
      return relu(x) * relu(x);
    case LMI_SOFT_CAP:
      return args.cap * tanh_of(x / args.cap);
    default:
      return clipped(x, -args.cap, args.cap);
  }
}

__device__ inline float gated(float gate, float up, const LmiActivation& args) {
  if (args.activation != LMI_CLAMPED_SWIGLU) return activated(gate, args) * up;
  const float x = clipped(gate, -INFINITY, kClampedLimit);
  return silu(kClampedSlope * x) / kClampedSlope *
         (clipped(up, -kClampedLimit, kClampedLimit) + 1.0f);
}

template <typename X, typename T, int kWidth>
__global__ void activation_kernel(const LmiActivation args) {
  wait_for_earlier_kernels();
  const int column = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
  if (column >= args.num_columns) return;
  const int64_t row = blockIdx.x;
  const X* source = static_cast<const X*>(args.x) +
                    row * (args.is_gated != 0 ? 2 : 1) * args.num_columns + column;
  float x[kWidth];
  load_floats(source, x);
  if (args.is_gated != 0) {
    float up[kWidth];
    load_floats(source + args.num_columns, up);
    for (int i = 0; i < kWidth; ++i) x[i] = gated(x[i], up[i], args);
  } else {
    for (int i = 0; i < kWidth; ++i) x[i] = activated(x[i], args);
  }
  store_as(static_cast<T*>(args.y) + row * args.num_columns + column, x);
}

}  // namespace
}  // namespace lmi::cuda

using namespace lmi::cuda;

int32_t lmi_cuda_activation(const LmiActivation* args, void* stream) {
  const bool is_gated = args->is_gated != 0;
  const bool is_known = args->activation >= LMI_SILU &&
                        args->activation <= (is_gated ? LMI_CLAMPED_SWIGLU : LMI_CLIP);
  if (!is_known || (!is_gated && args->activation == LMI_CLAMPED_SWIGLU)) {
    return fail("activation: " + std::to_string(args->activation) + (is_gated ? ", gated" : "") +
                "; known are 0 to 4, gated 5, ungated 6 and 7");
  }
  if (args->activation >= LMI_SOFT_CAP && !(args->cap > 0.0f)) {
    return fail("activation: a cap of " + std::to_string(args->cap) +
                "; numbers above 0 can be had");
  }
  const bool is_wide = args->num_columns % 4 == 0 && is_aligned(args->x) && is_aligned(args->y);
  const Grid grid = {args->num_rows, ceil_div(args->num_columns, kThreads * (is_wide ? 4 : 1))};
  return with_operands("activation", args->x_dtype, args->y_dtype, [&](auto operand, auto result) {
    using X = decltype(operand);
    using T = decltype(result);
    const auto kernel = is_wide ? activation_kernel<X, T, 4> : activation_kernel<X, T, 1>;
    return launch("activation", kernel, grid, kThreads, 0, stream, *args);
  });
}
