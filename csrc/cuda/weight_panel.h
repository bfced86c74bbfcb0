// Finding one's way in panels of 16 outputs (csrc/cpu/kernels.h), the same bytes that the CPU
// reads. int4: per group of inputs 16 fp16 scales, 16 fp16 zero points, then for every 8 inputs 16
// words, one per output, whose byte i holds input i below and input i + 4 above. int8: 16 fp32
// scales, then for every 4 inputs 16 words of a byte per input, 128 more than the weight over its
// scale.
#pragma once

#include <cstdint>

#include "cuda/host_device.h"

namespace lmi::cuda {

constexpr int kPanelOutputs = 16;
constexpr int kPanelHeaderBytes = 64;
constexpr int kPanelZerosOffset = 32;
constexpr int kPanelStepBytes = 64;  // of 8 inputs, int8: of 4

LMI_HOST_DEVICE constexpr int64_t panel_group_bytes(int group_size) {
  return kPanelHeaderBytes + group_size / 8 * kPanelStepBytes;
}

// group_size 0: int8.
LMI_HOST_DEVICE constexpr int64_t panel_bytes(int num_inputs, int group_size) {
  return group_size == 0 ? kPanelHeaderBytes + ceil_div(num_inputs, 4) * int64_t{kPanelStepBytes}
                         : ceil_div(num_inputs, group_size) * panel_group_bytes(group_size);
}

// The same of panels whose codes are bytes; in groups of 128 inputs each has its header.
constexpr int kByteGroupInputs = 128;
constexpr int kByteGroupBytes = kPanelHeaderBytes + kByteGroupInputs / 4 * kPanelStepBytes;

LMI_HOST_DEVICE constexpr int64_t byte_panel_bytes(int num_inputs, bool is_grouped) {
  return is_grouped ? int64_t{ceil_div(num_inputs, kByteGroupInputs)} * kByteGroupBytes
                    : panel_bytes(num_inputs, 0);
}

// Where a panel has four inputs, the step's number being in 16 outputs' words of four inputs.
LMI_HOST_DEVICE constexpr int64_t byte_step_offset(int step, bool is_grouped) {
  const int64_t num_headers = is_grouped ? step / (kByteGroupInputs / 4) + 1 : 1;
  return num_headers * kPanelHeaderBytes + int64_t{step} * kPanelStepBytes;
}

// The output that a lane of a panel stands for, -1 for padding.
LMI_HOST_DEVICE constexpr int panel_output(int panel, int lane, int num_outputs, bool is_gated) {
  const int num_half = is_gated ? num_outputs / 2 : num_outputs;
  const int output = (is_gated ? panel / 2 : panel) * kPanelOutputs + lane;
  if (output >= num_half) return -1;
  return is_gated && panel % 2 == 1 ? num_half + output : output;
}

// The place of an output in its panel.
struct PanelPlace {
  int panel;
  int lane;
};
LMI_HOST_DEVICE constexpr PanelPlace place_in_panels(int output, int num_outputs, bool is_gated) {
  if (!is_gated) return {output / kPanelOutputs, output % kPanelOutputs};
  const int is_up = output >= num_outputs / 2;
  const int own = output - is_up * (num_outputs / 2);
  return {own / kPanelOutputs * 2 + is_up, own % kPanelOutputs};
}

LMI_HOST_DEVICE constexpr int num_panels(int num_outputs, bool is_gated) {
  return is_gated ? 2 * ceil_div(num_outputs / 2, kPanelOutputs)
                  : ceil_div(num_outputs, kPanelOutputs);
}

// Column c of tile j of 8 outputs is this lane of this panel, so that the four tiles of two panels
// have neighbours for a thread.
LMI_HOST_DEVICE constexpr int panel_of(int column) { return column / 4; }
LMI_HOST_DEVICE constexpr int panel_lane_of(int column, int tile) { return column % 4 * 4 + tile; }

// A word of eight codes becomes pairs of 16-bit numbers in two turns: its lower (half 0) or upper
// codes alone in their bytes, then two bytes, each under the other byte of a number whose last bits
// count in ones.
constexpr uint32_t kCodesMask = 0x0f0f0f0f;
LMI_HOST_DEVICE constexpr uint32_t half_codes(uint32_t word, int half) {
  return word >> (4 * half) & kCodesMask;
}
// For permute_bytes(codes, upper bytes, ...): inputs 0 and 1 of a half, or 2 and 3.
LMI_HOST_DEVICE constexpr uint32_t code_pair_selector(int pair) {
  return pair == 0 ? 0x4140 : 0x4342;
}

}  // namespace lmi::cuda
