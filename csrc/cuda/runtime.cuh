// What the step list needs of a device beside kernels, under one set of names: streams, events,
// copies, memory, captured graphs. Functions return 0, or an error whose text lmi_cuda_error has.
#pragma once

#include <cstdint>

#if defined(LMI_CUDA_EMULATOR)
#include "cuda_emulator/runtime.h"
#else
#include "cuda/nvidia_runtime.cuh"
#endif
