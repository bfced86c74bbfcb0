// Functions for host and device alike: what has no business with threads is tested on the host.
#pragma once

#if defined(__CUDACC__)
#define LMI_HOST_DEVICE __host__ __device__
#else
#define LMI_HOST_DEVICE
#endif

namespace lmi::cuda {

template <typename Int>
LMI_HOST_DEVICE constexpr Int ceil_div(Int value, Int divisor) {
  return (value + divisor - 1) / divisor;
}

template <typename Int>
LMI_HOST_DEVICE constexpr Int round_up(Int value, Int multiple) {
  return ceil_div(value, multiple) * multiple;
}

template <typename Number>
LMI_HOST_DEVICE constexpr Number lower_of(Number a, Number b) {
  return a < b ? a : b;
}

template <typename Number>
LMI_HOST_DEVICE constexpr Number greater_of(Number a, Number b) {
  return a < b ? b : a;
}

}  // namespace lmi::cuda
