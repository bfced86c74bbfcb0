// Products of many rows with int4 panels: the weight is unpacked into 16-bit elements, once for all
// rows, and multiplied as a dense one.
//
// A slice of outputs at a time, all of them where they fit: slices bound the memory, but none is so
// small that its product leaves parts of the device idle. Unpacking is bound by memory. A thread
// reads eight inputs of four outputs, 16 bytes of a panel, and a warp what lies side by side; each
// of the four becomes 16 bytes of an output's row, and eight threads write 128 bytes of a row.
#include "cuda/linear_unpacked.h"

#include "cuda/launch.cuh"
#include "cuda/linear_dense.h"
#include "cuda/weight_panel.h"

namespace lmi::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kQuads = 4;  // of outputs in a panel
constexpr int kStepInputs = 8;
constexpr int kUnroll = 4;
constexpr int kBlockSteps = kThreads / kQuads * kUnroll;
constexpr int kSliceOutputs = 64;  // or a multiple: results and biases start on 256 bytes

// Outputs and the panels that have them, in the order of outputs, gate before up.
struct Slice {
  const uint8_t* panels;  // of the whole weight
  void* weight;           // [outputs of the slice, num_inputs]
  int32_t first_place;
  int32_t num_places;
  int32_t first_output;
  int32_t end_output;
  int32_t num_outputs;  // of the whole weight, as the following
  int32_t num_inputs;
  int32_t group_size;
  int32_t is_gated;
};

// The number of the panel at a place in the order of outputs, and where that order has an output.
LMI_HOST_DEVICE constexpr int panel_at_place(int place, int num_places, bool is_gated) {
  if (!is_gated) return place;
  const int num_half = num_places / 2;
  return place < num_half ? 2 * place : 2 * (place - num_half) + 1;
}
constexpr int place_of_output(int output, int num_outputs, bool is_gated) {
  const int num_half = num_outputs / 2;
  if (!is_gated || output < num_half) return output / kPanelOutputs;
  return ceil_div(num_half, kPanelOutputs) + (output - num_half) / kPanelOutputs;
}

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

Slice slice_of(const LmiLinearPacked& args, int first, int end) {
  const auto place_of = [&](int output) {
    return place_of_output(output, args.num_outputs, args.is_gated != 0);
  };
  return {static_cast<const uint8_t*>(args.panels),
          args.unpacked,
          place_of(first),
          place_of(end - 1) - place_of(first) + 1,
          first,
          end,
          args.num_outputs,
          args.num_inputs,
          args.group_size,
          args.is_gated};
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

// Calls action(first, end) with the outputs of slices of about the same size.
template <typename Action>
int32_t for_slices(const LmiLinearPacked& args, const Action& action) {
  const int64_t num_fitting = args.unpacked_bytes / (int64_t{args.num_inputs} * 2);
  int num_in_slice = args.num_outputs;
  if (num_fitting < args.num_outputs) {
    const int most = static_cast<int>(num_fitting) / kSliceOutputs * kSliceOutputs;
    if (most == 0) {
      return fail("linear_packed: no " + std::to_string(kSliceOutputs) + " outputs of " +
                  std::to_string(args.num_inputs) + " inputs fit into " +
                  std::to_string(args.unpacked_bytes) + " bytes");
    }
    const int num_slices = ceil_div(args.num_outputs, most);
    num_in_slice = round_up(ceil_div(args.num_outputs, num_slices), kSliceOutputs);
  }
  for (int first = 0; first < args.num_outputs; first += num_in_slice) {
    const int end = lower_of(first + num_in_slice, args.num_outputs);
    if (const int32_t status = action(first, end)) return status;
  }
  return kOk;
}

}  // namespace

int32_t prepare_linear_unpacked(const LmiLinearPacked& args) {
  return for_slices(
      args, [&](int first, int end) { return prepare_linear_dense(product_of(args, first, end)); });
}

int32_t launch_linear_unpacked(const LmiLinearPacked& args, void* stream) {
  return for_slices(args, [&](int first, int end) {
    const int32_t status = unpack(slice_of(args, first, end), stream);
    if (status != kOk) return status;
    const LmiLinearDense product = product_of(args, first, end);
    return lmi_cuda_linear_dense(&product, stream);
  });
}

}  // namespace lmi::cuda
