// Products of many rows with int4 panels, by way of a dense weight.
#pragma once

#include "cuda/lmi_cuda.h"

namespace lmi::cuda {

inline bool is_unpacked(const LmiLinearPacked& args) {
  return args.unpacked != nullptr && args.num_rows > args.max_packed_rows;
}

// For arguments that are. The first asks for the algorithms of the products.
int32_t prepare_linear_unpacked(const LmiLinearPacked& args);
int32_t launch_linear_unpacked(const LmiLinearPacked& args, void* stream);

}  // namespace lmi::cuda
