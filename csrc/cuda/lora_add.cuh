// The first of an adapter's two products for few rows, which linear_few_rows.cu's kernel makes.
#pragma once

#include "cuda/device.cuh"
#include "cuda/lmi_adapters.h"

namespace lmi::cuda {

// a x of a tile's rows, over a part of the inputs.
struct LoraProduct {
  const void* x;
  const void* weight;
  const float* bias;
  float* y;
  int32_t num_rows;
  int32_t num_outputs;
  int32_t num_inputs;
  int32_t y_stride;
  int32_t stride;  // inputs between rows
};

template <bool>
__device__ int source_row(const LoraProduct&, int row) {
  return row;
}

__device__ inline int64_t input_stride(const LoraProduct& args) { return args.stride; }

LMI_HOST_DEVICE constexpr int lora_splits(int num_inputs) {
  return ceil_div(num_inputs, LMI_LORA_SPLIT_INPUTS);
}

int32_t launch_lora_few_rows(const LmiLoraAdd& args, void* stream);

}  // namespace lmi::cuda
