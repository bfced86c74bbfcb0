// Attention of heads over kMaxHeadDim, whose keys are the values, too.
#pragma once

#include <cstdint>

#include "cuda/lmi_cuda.h"

namespace lmi::cuda {

// Of arguments that check_attention has seen.
int32_t launch_latent_attention(const LmiAttention& args, bool is_decode, void* stream);

}  // namespace lmi::cuda
