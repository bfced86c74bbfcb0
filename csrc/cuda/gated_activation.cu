// The gated activations that most models have: elementwise, bound by memory; with their results
// quantised, one block per row.
#include "cuda/activations.cuh"
#include "cuda/row_codes.cuh"

namespace lmi::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxThreads = 1024;  // of a row that is quantised
constexpr int kMaxSteps = 8;       // vectors that a thread keeps of it
constexpr int kFewSteps = 4;       // the same where rows are few, and threads are to be many
constexpr int kFewRows = 128;      // about a device's processors: more rows than that share them
constexpr int kLoadSteps = 2;      // vectors whose loads are under way at a time

// gate becomes act(gate) * up.
template <bool kIsSilu, int kWidth>
__device__ inline void activate(float (&gate)[kWidth], const float (&up)[kWidth]) {
  for (int i = 0; i < kWidth; ++i) {
    gate[i] = (kIsSilu ? silu(gate[i]) : gelu_tanh(gate[i])) * up[i];
  }
}

template <typename X, typename T, int kWidth, bool kIsSilu>
__global__ void gated_activation_kernel(const LmiGatedActivation args) {
  wait_for_earlier_kernels();
  const int column = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
  if (column >= args.num_columns) return;
  const int64_t row = blockIdx.x;
  const X* source = static_cast<const X*>(args.gate_up) + row * 2 * args.num_columns + column;
  float gate[kWidth];
  float up[kWidth];
  load_floats(source, gate);
  load_floats(source + args.num_columns, up);
  activate<kIsSilu>(gate, up);
  store_as(static_cast<T*>(args.y) + row * args.num_columns + column, gate);
}

template <typename T, int kWidth, bool kIsSilu, typename Code>
__global__ void __launch_bounds__(kMaxThreads) gated_codes_kernel(const LmiGatedActivation args) {
  wait_for_earlier_kernels();
  const int64_t row = blockIdx.x;
  const float* source = static_cast<const float*>(args.gate_up) + row * 2 * args.num_columns;
  const auto column_of = [](int step) {
    return static_cast<int>(step * blockDim.x + threadIdx.x) * kWidth;
  };
  Vector<T, kWidth> kept[kMaxSteps];
  Magnitude magnitude;
#pragma unroll
  for (int first = 0; first < kMaxSteps; first += kLoadSteps) {
    if (column_of(first) >= args.num_columns) break;
    float gate[kLoadSteps][kWidth] = {};
    float up[kLoadSteps][kWidth] = {};
#pragma unroll
    for (int i = 0; i < kLoadSteps; ++i) {
      const int column = column_of(first + i);
      if (column >= args.num_columns) continue;
      load_floats(source + column, gate[i]);
      load_floats(source + args.num_columns + column, up[i]);
    }
#pragma unroll
    for (int i = 0; i < kLoadSteps; ++i) {
      activate<kIsSilu>(gate[i], up[i]);
      kept[first + i] = rounded<T>(gate[i]);
      magnitude.add(kept[first + i]);
    }
  }
  const auto visit = [&](const auto& action) {
#pragma unroll
    for (int step = 0; step < kMaxSteps; ++step) {
      const int column = column_of(step);
      if (column < args.num_columns) action(column, kept[step]);
    }
  };
  const RowCodes<Code> codes(args, magnitude, visit);
  if (args.y != nullptr) {
    T* y = static_cast<T*>(args.y) + row * args.num_columns;
    visit([&](int column, const auto& numbers) { store_vector(y + column, numbers); });
  }
  codes.template finish<kWidth>(args.num_columns, args.stride);
}

template <typename X, typename T, int kWidth, bool kIsSilu>
int32_t launch_plain(const LmiGatedActivation& args, void* stream) {
  const Grid grid = {args.num_rows, ceil_div(args.num_columns, kThreads * kWidth)};
  const auto kernel = gated_activation_kernel<X, T, kWidth, kIsSilu>;
  return launch("gated_activation", kernel, grid, kThreads, 0, stream, args);
}

template <typename T, int kWidth, bool kIsSilu>
int32_t launch_coded(const LmiGatedActivation& args, void* stream) {
  constexpr int kMost = kMaxSteps * kMaxThreads * kWidth;
  if (args.num_columns < 1 || args.num_columns > kMost) {
    return fail("gated_activation: codes of " + std::to_string(args.num_columns) +
                " columns, 1 to " + std::to_string(kMost) + " can be had");
  }
  const int steps = args.num_rows <= kFewRows ? kFewSteps : kMaxSteps;
  const int wanted = round_up(ceil_div(args.num_columns, steps * kWidth), kWarpSize);
  const int num_threads = wanted < kMaxThreads ? wanted : kMaxThreads;
  return with_row_codes("gated_activation", args, [&](auto code) {
    using Code = decltype(code);
    return launch("gated_activation", gated_codes_kernel<T, kWidth, kIsSilu, Code>, {args.num_rows},
                  num_threads, 0, stream, args);
  });
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
  const auto run = [&](auto operand, auto result) {
    return with_bool(args->activation == LMI_SILU, [&](auto is_silu) {
      using X = decltype(operand);
      using T = decltype(result);
      constexpr bool kIsSilu = decltype(is_silu)::value;
      if (args->codes == nullptr) {
        return is_wide ? launch_plain<X, T, 4, kIsSilu>(*args, stream)
                       : launch_plain<X, T, 1, kIsSilu>(*args, stream);
      }
      if constexpr (!std::is_same_v<X, float>) {
        return fail("gated_activation: codes of bf16 operands");
      } else {
        return is_wide ? launch_coded<T, 4, kIsSilu>(*args, stream)
                       : launch_coded<T, 1, kIsSilu>(*args, stream);
      }
    });
  };
  return with_operands("gated_activation", args->x_dtype, args->y_dtype, run);
}
