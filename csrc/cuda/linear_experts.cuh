// Dense products of each row with its own expert's matrix: few rows of an expert by
// linear_few_rows.cu's kernel, more by linear_tiled.cu's.
#pragma once

#include "cuda/expert_tile.cuh"
#include "cuda/lmi_cuda.h"

namespace lmi::cuda {

// What a block makes of it: a product with one matrix.
struct ExpertProduct : LmiLinearExperts {
  const void* weight = nullptr;
  int32_t y_stride;

  __device__ explicit ExpertProduct(const LmiLinearExperts& args)
      : LmiLinearExperts(args), y_stride(args.num_outputs) {}
};

__device__ inline void take_matrix(ExpertProduct& args, const void* matrix) {
  args.weight = matrix;
}

__device__ inline void skip_rows(ExpertProduct& args, int num_rows) {
  args.x = static_cast<const bf16*>(args.x) + int64_t{num_rows} * args.num_inputs;
}

int32_t launch_few_expert_rows(const LmiLinearExperts& args, void* stream);
int32_t launch_expert_tiles(const LmiLinearExperts& args, void* stream);

}  // namespace lmi::cuda
