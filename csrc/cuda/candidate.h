// A token and its logit as one integer: greater is earlier in the order of (logit descending, id
// ascending), in which the filters of the sampler keep a prefix.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/host_device.h"

namespace lmi::cuda {

LMI_HOST_DEVICE inline uint64_t candidate_of(float logit, int32_t token_id) {
  logit += 0.0f;  // -0 and 0 are equal
  uint32_t bits;
  memcpy(&bits, &logit, sizeof(bits));
  bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u;
  return uint64_t{bits} << 32 | (0xffffffffu - static_cast<uint32_t>(token_id));
}

LMI_HOST_DEVICE inline int32_t token_of(uint64_t candidate) {
  return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(candidate));
}

LMI_HOST_DEVICE inline float logit_of(uint64_t candidate) {
  auto bits = static_cast<uint32_t>(candidate >> 32);
  bits ^= bits >> 31 ? 0x80000000u : 0xffffffffu;
  float logit;
  memcpy(&logit, &bits, sizeof(logit));
  return logit;
}

}  // namespace lmi::cuda
