// Weights in panels that are laid out as rows, for products by cuBLASLt: a slice of outputs at a
// time, all of them where they fit. Slices bound the memory, but none is so small that its product
// leaves parts of the device idle.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/weight_panel.h"

namespace lmi::cuda {

constexpr int kSliceOutputs = 64;  // or a multiple: results and biases start on 256 bytes

// Outputs and the panels that have them, in the order of outputs, gate before up.
struct Slice {
  const uint8_t* panels;  // of the whole weight
  void* weight;           // [outputs of the slice, row]
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

// Of a product's arguments.
template <typename Args>
Slice slice_of(const Args& args, int first, int end) {
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

// Calls action(first, end) with the outputs of slices of about the same size, of rows of so many
// bytes.
template <typename Args, typename Action>
int32_t for_slices(const char* name, const Args& args, int64_t row_bytes, const Action& action) {
  const int64_t num_fitting = args.unpacked_bytes / row_bytes;
  int num_in_slice = args.num_outputs;
  if (num_fitting < args.num_outputs) {
    const int most = static_cast<int>(num_fitting) / kSliceOutputs * kSliceOutputs;
    if (most == 0) {
      return fail(std::string(name) + ": no " + std::to_string(kSliceOutputs) + " outputs of " +
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

}  // namespace lmi::cuda
