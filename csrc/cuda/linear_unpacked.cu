// Products of many rows with int4 panels: the weight is unpacked into 16-bit elements, once for all
// rows, and multiplied as a dense one.
//
// Unpacking is bound by memory. A thread reads eight inputs of four outputs, 16 bytes of a panel,
// and a warp what lies side by side; each of the four becomes 16 bytes of an output's row, and
// eight threads write 128 bytes of a row.
#include "cuda/linear_unpacked.h"

#include "cuda/launch.cuh"
#include "cuda/linear_dense.h"
#include "cuda/unpacked_slices.h"

namespace lmi::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kQuads = 4;  // of outputs in a panel
constexpr int kStepInputs = 8;
constexpr int kUnroll = 4;
constexpr int kBlockSteps = kThreads / kQuads * kUnroll;

// A float whose last bits count in ones, and the upper bytes of all those.
constexpr float kCounting = 8388608.0f;
constexpr uint32_t kCountingBits = 0x4b000000;

// Of a half of a word's codes, one less its zero point, which comes with kCounting added: exact.
__device__ inline float weight_of(uint32_t codes, int at, float raised_zero) {
  const uint32_t selector = 0x7650u + static_cast<uint32_t>(at);
  return float_of_bits(permute_bytes(codes, kCountingBits, selector)) - raised_zero;
}

__global__ void __launch_bounds__(kThreads) unpack_kernel(const Slice args) {
  wait_for_earlier_kernels();
  const int place = args.first_place + static_cast<int>(blockIdx.x);
  const bool is_gated = args.is_gated != 0;
  const int num_places = num_panels(args.num_outputs, is_gated);
  const int panel = panel_at_place(place, num_places, is_gated);
  const uint8_t* source = args.panels + panel * panel_bytes(args.num_inputs, args.group_size);
  const int quad = static_cast<int>(threadIdx.x) % kQuads;
  const int first_step =
      static_cast<int>(blockIdx.y) * kBlockSteps + static_cast<int>(threadIdx.x) / kQuads;
  const int num_steps = args.num_inputs / kStepInputs;
  const int group_steps = args.group_size / kStepInputs;
  Word4 words[kUnroll] = {};
  Vector<f16, kQuads> scales[kUnroll] = {};
  Vector<f16, kQuads> zeros[kUnroll] = {};
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int step = first_step + i * (kBlockSteps / kUnroll);
    if (step >= num_steps) break;
    const uint8_t* group = source + step / group_steps * panel_group_bytes(args.group_size);
    words[i] = *reinterpret_cast<const Word4*>(
        group + kPanelHeaderBytes + step % group_steps * kPanelStepBytes + quad * sizeof(Word4));
    const auto* header = reinterpret_cast<const Vector<f16, kQuads>*>(group) + quad;
    scales[i] = header[0];
    zeros[i] = header[kPanelZerosOffset / static_cast<int>(sizeof(*header))];
  }
  auto* target = static_cast<bf16*>(args.weight);
#pragma unroll
  for (int lane = 0; lane < kQuads; ++lane) {
    const int output = panel_output(panel, quad * kQuads + lane, args.num_outputs, is_gated);
    if (output < args.first_output || output >= args.end_output) continue;  // padding is -1
    bf16* row = target + int64_t{output - args.first_output} * args.num_inputs;
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int step = first_step + i * (kBlockSteps / kUnroll);
      if (step >= num_steps) break;
      const float scale = to_float(scales[i].at[lane]);
      const float zero = kCounting + to_float(zeros[i].at[lane]);
      float weights[kStepInputs];
#pragma unroll
      for (int input = 0; input < kStepInputs; ++input) {
        const uint32_t codes = half_codes(words[i].at[lane], input / 4);
        weights[input] = weight_of(codes, input % 4, zero) * scale;
      }
      store_as(row + step * kStepInputs, weights);
    }
  }
}

int32_t unpack(const Slice& slice, void* stream) {
  const Grid grid = {slice.num_places, ceil_div(slice.num_inputs / kStepInputs, kBlockSteps)};
  return launch("unpack", unpack_kernel, grid, kThreads, 0, stream, slice);
}

LmiLinearDense product_of(const LmiLinearPacked& args, int first, int end) {
  LmiLinearDense product = {};
  product.x = args.x;
  product.weight = args.unpacked;
  product.bias = args.bias == nullptr ? nullptr : args.bias + first;
  product.y = args.y + first;
  product.workspace = args.workspace;
  product.workspace_bytes = args.workspace_bytes;
  product.num_rows = args.num_rows;
  product.num_outputs = end - first;
  product.num_inputs = args.num_inputs;
  product.y_stride = args.num_outputs;
  product.dtype = args.dtype;
  return product;
}

template <typename Action>
int32_t for_packed_slices(const LmiLinearPacked& args, const Action& action) {
  return for_slices("linear_packed", args, int64_t{args.num_inputs} * 2, action);
}

}  // namespace

int32_t prepare_linear_unpacked(const LmiLinearPacked& args) {
  return for_packed_slices(
      args, [&](int first, int end) { return prepare_linear_dense(product_of(args, first, end)); });
}

int32_t launch_linear_unpacked(const LmiLinearPacked& args, void* stream) {
  return for_packed_slices(args, [&](int first, int end) {
    const int32_t status = unpack(slice_of(args, first, end), stream);
    if (status != kOk) return status;
    const LmiLinearDense product = product_of(args, first, end);
    return lmi_cuda_linear_dense(&product, stream);
  });
}

}  // namespace lmi::cuda
