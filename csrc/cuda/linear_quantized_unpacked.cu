// Products of many rows of codes by cuBLASLt: the weight's codes are laid out as rows, once for all
// rows, sums of products take the place of the results, and a last kernel makes these of them.
//
// Laying out is bound by memory: a thread reads 16 inputs of four outputs, which lie side by side
// for the threads of a warp, and writes 16 bytes of each output's row. The last kernel reads and
// writes the results once.
#include "cuda/linear_dense.h"
#include "cuda/linear_unpacked.h"
#include "cuda/quantized_codes.cuh"
#include "cuda/unpacked_slices.h"

namespace lmi::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kQuads = 4;  // of outputs in a panel
constexpr int kSteps = 4;  // that a thread takes, of kStepInputs
constexpr int kStepInputs = 4;
constexpr int kBlockInputs = kThreads / kQuads * kSteps * kStepInputs;
constexpr int kWidth = 4;  // results that a thread takes, where they have a panel in common

// flipped: bits of a word of a panel that aren't those of its codes.
struct CodeSlice {
  Slice slice;
  int32_t stride;  // of the codes' rows, those past the inputs zeros
  uint32_t flipped;
};

__global__ void __launch_bounds__(kThreads) unpack_codes_kernel(const CodeSlice args) {
  wait_for_earlier_kernels();
  const Slice& slice = args.slice;
  const bool is_gated = slice.is_gated != 0;
  const int thread = static_cast<int>(threadIdx.x);
  const int first_input =
      static_cast<int>(blockIdx.y) * kBlockInputs + thread / kQuads * (kSteps * kStepInputs);
  if (first_input >= args.stride) return;
  const int panel = panel_at_place(slice.first_place + static_cast<int>(blockIdx.x),
                                   num_panels(slice.num_outputs, is_gated), is_gated);
  const int quad = thread % kQuads;
  const uint8_t* source =
      slice.panels + panel * panel_bytes(slice.num_inputs, 0) + quad * sizeof(Word4);
  Word4 words[kSteps] = {};
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    if (first_input + i * kStepInputs >= slice.num_inputs) break;
    words[i] = *reinterpret_cast<const Word4*>(
        source + byte_step_offset(first_input / kStepInputs + i, false));
#pragma unroll
    for (uint32_t& word : words[i].at) word ^= args.flipped;
  }
#pragma unroll
  for (int lane = 0; lane < kQuads; ++lane) {
    const int output = panel_output(panel, quad * kQuads + lane, slice.num_outputs, is_gated);
    if (output < slice.first_output || output >= slice.end_output) continue;  // padding is -1
    uint8_t* row = static_cast<uint8_t*>(slice.weight) +
                   static_cast<int64_t>(output - slice.first_output) * args.stride;
    Word4 codes;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) codes.at[i] = words[i].at[lane];
    *reinterpret_cast<Word4*>(row + first_input) = codes;
  }
}

// In place: y has sums of products of codes, int32 or fp32 as Codes::Sum.
template <typename Codes, int kCount>
__global__ void __launch_bounds__(kThreads) finish_sums_kernel(const LmiLinearQuantized args) {
  wait_for_earlier_kernels();
  const int first = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * kCount;
  if (first >= args.num_outputs) return;
  const int row = static_cast<int>(blockIdx.x);
  float* target = args.y + static_cast<int64_t>(row) * args.num_outputs + first;
  const auto sums = *reinterpret_cast<const Vector<typename Codes::Sum, kCount>*>(target);
  const PanelPlace place = place_in_panels(first, args.num_outputs, args.is_gated != 0);
  const int count = num_outliers<Codes>(args, row);
  float y[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int lane = place.lane + i;
    const float total = total_of<Codes>(args, sums.at[i], row, count, place.panel, lane);
    y[i] = finish_sum(args, total, weight_scale_of<Codes>(args, place.panel, lane), row, first + i);
  }
  store_floats(target, y);
}

LmiLinearDense product_of(const LmiLinearQuantized& args, int first, int end) {
  LmiLinearDense product = {};
  product.x = args.codes;
  product.weight = args.unpacked;
  product.y = args.y + first;
  product.workspace = args.workspace;
  product.workspace_bytes = args.workspace_bytes;
  product.num_rows = args.num_rows;
  product.num_outputs = end - first;
  product.num_inputs = args.stride;
  product.y_stride = args.num_outputs;
  product.dtype = args.code_type;
  return product;
}

template <typename Action>
int32_t for_code_slices(const LmiLinearQuantized& args, const Action& action) {
  return for_slices("linear_quantized", args, args.stride, action);
}

int32_t unpack(const LmiLinearQuantized& args, const Slice& slice, void* stream) {
  const CodeSlice codes = {slice, args.stride, args.code_type == LMI_I8 ? 0x80808080u : 0u};
  const Grid grid = {slice.num_places, ceil_div(args.stride, kBlockInputs)};
  return launch("unpack_codes", unpack_codes_kernel, grid, kThreads, 0, stream, codes);
}

template <typename Codes>
int32_t finish(const LmiLinearQuantized& args, void* stream) {
  const bool is_wide = args.num_outputs % (kWidth << (args.is_gated != 0)) == 0;
  const auto run = [&](auto count) {
    constexpr int kCount = decltype(count)::value;
    const Grid grid = {args.num_rows, ceil_div(args.num_outputs, kThreads * kCount)};
    return launch("finish_sums", finish_sums_kernel<Codes, kCount>, grid, kThreads, 0, stream,
                  args);
  };
  if (is_wide) return run(std::integral_constant<int, kWidth>{});
  return run(std::integral_constant<int, 1>{});
}

}  // namespace

int32_t prepare_linear_unpacked(const LmiLinearQuantized& args) {
  return for_code_slices(
      args, [&](int first, int end) { return prepare_linear_dense(product_of(args, first, end)); });
}

int32_t launch_linear_unpacked(const LmiLinearQuantized& args, void* stream) {
  bool is_there = true;
  if (const int32_t status = for_code_slices(args, [&](int first, int end) {
        return find_dense_algorithm(product_of(args, first, end), &is_there);
      })) {
    return status;
  }
  if (!is_there) return launch_quantized_tiles(args, stream);
  const int32_t status = for_code_slices(args, [&](int first, int end) {
    const int32_t unpacked = unpack(args, slice_of(args, first, end), stream);
    return unpacked == kOk ? multiply_dense(product_of(args, first, end), stream) : unpacked;
  });
  if (status != kOk) return status;
  return args.code_type == LMI_I8 ? finish<Int8>(args, stream) : finish<Fp8<false>>(args, stream);
}

}  // namespace lmi::cuda
