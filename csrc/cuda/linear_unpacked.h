// Products of many rows with panels, by way of a weight laid out as rows.
#pragma once

#include "cuda/lmi_cuda.h"

namespace lmi::cuda {

inline bool is_unpacked(const LmiLinearPacked& args) {
  return args.unpacked != nullptr && args.num_rows > args.max_packed_rows;
}

// Codes with scales of groups are not: those go between sums of a group and the next.
inline bool is_unpacked(const LmiLinearQuantized& args) {
  return args.unpacked != nullptr && args.num_rows > args.max_panel_rows && args.group_size == 0;
}

// For arguments that are. The first ones ask for the algorithms of the products.
int32_t prepare_linear_unpacked(const LmiLinearPacked& args);
int32_t prepare_linear_unpacked(const LmiLinearQuantized& args);
int32_t launch_linear_unpacked(const LmiLinearPacked& args, void* stream);
int32_t launch_linear_unpacked(const LmiLinearQuantized& args, void* stream);

}  // namespace lmi::cuda
