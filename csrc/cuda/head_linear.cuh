// Dense products of each head's columns with its own matrix: few rows by linear_few_rows.cu's
// kernel, more by linear_tiled.cu's.
#pragma once

#include "cuda/device.cuh"
#include "cuda/lmi_cuda.h"

namespace lmi::cuda {

// What a block makes of it: a product with one matrix.
struct HeadProduct : LmiHeadLinear {
  const void* weight;
  const float* bias = nullptr;
  int32_t y_stride;

  __device__ HeadProduct(const LmiHeadLinear& args, int head)
      : LmiHeadLinear(args),
        weight(reinterpret_cast<const void*>(args.matrices[head])),
        y_stride(args.num_heads * args.num_outputs) {}
};

template <typename T, typename Y>
__device__ HeadProduct head_product(const LmiHeadLinear& args, int head) {
  HeadProduct own(args, head);
  own.x = static_cast<const T*>(args.x) + int64_t{head} * args.num_inputs;
  own.y = static_cast<Y*>(args.y) + int64_t{head} * args.num_outputs;
  return own;
}

// Rows of one head lie as far apart as all heads' inputs.
template <bool>
__device__ int source_row(const HeadProduct& args, int row) {
  return row * args.num_heads;
}

int32_t launch_few_head_rows(const LmiHeadLinear& args, void* stream);
// is_wide: rows of a head start on 16 bytes, and end there.
int32_t launch_head_tiles(const LmiHeadLinear& args, bool is_wide, void* stream);

}  // namespace lmi::cuda
