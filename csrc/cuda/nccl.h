// What we call of NCCL, declared here: the library is opened at run time and needn't be there when
// this one is built or loaded. Names and numbers are those of nccl.h, version 2.
#pragma once

#include <cstddef>

#include "cuda/lmi_cuda.h"

namespace lmi::cuda::nccl {

using Communicator = void*;

struct Id {
  char bytes[LMI_RANKS_ID_BYTES];
};

constexpr int kInt32 = 2;  // ncclDataType_t
constexpr int kFloat32 = 7;
constexpr int kSum = 0;  // ncclRedOp_t

// Each returns 0, or an error; counts are of elements.
struct Functions {
  int (*make_id)(Id*);
  int (*join)(Communicator*, int num_ranks, Id, int rank);
  int (*abort)(Communicator);
  int (*all_reduce)(const void* x, void* y, size_t count, int type, int operation, Communicator,
                    void* stream);
  int (*all_gather)(const void* x, void* y, size_t count_of_rank, int type, Communicator,
                    void* stream);
  int (*broadcast)(const void* x, void* y, size_t count, int type, int root, Communicator,
                   void* stream);
  const char* (*error)(int status);
};

}  // namespace lmi::cuda::nccl
