// Launching kernels, and the errors of the C interface.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "cuda/device.cuh"
#include "cuda/lmi_cuda.h"

namespace lmi::cuda {

constexpr int32_t kOk = 0;
constexpr int32_t kBadArgument = -1;

// Of the calling thread; lmi_cuda_error gives it out.
std::string& error_text();

// For lmi_cuda_notice.
void add_notice(const std::string& text);

// Programmatic dependent launch, from sm_90 on: whether kernels may start while the one before them
// ends. They wait for it themselves: wait_for_earlier_kernels.
bool& uses_dependent_launch();

inline int32_t fail(const std::string& text) {
  error_text() = text;
  return kBadArgument;
}

struct Grid {
  int64_t x = 1;
  int64_t y = 1;
  int64_t z = 1;
};

constexpr int64_t kMaxGridHeight = 65535;  // and depth

inline bool is_empty(const Grid& grid) { return grid.x == 0 || grid.y == 0 || grid.z == 0; }

inline int32_t check_grid(const char* name, const Grid& grid) {
  if (grid.y <= kMaxGridHeight && grid.z <= kMaxGridHeight) return kOk;
  return fail(std::string(name) + ": a grid of " + std::to_string(grid.x) + " x " +
              std::to_string(grid.y) + " x " + std::to_string(grid.z) + " blocks; at most " +
              std::to_string(kMaxGridHeight) + " can be had of the latter two");
}

}  // namespace lmi::cuda

#if defined(LMI_CUDA_EMULATOR)
#include "cuda_emulator/launch.h"
#else
#include "cuda/nvidia_launch.cuh"
#endif

namespace lmi::cuda {

inline int32_t check_bf16(const char* name, int32_t dtype) {
  if (dtype == LMI_BF16) return kOk;
  return fail(std::string(name) + ": element type " + std::to_string(dtype) +
              "; 1 (bf16) can be had");
}

// Calls action(T{}) with the element type of that number.
template <typename Action>
int32_t with_dtype(const char* name, int32_t dtype, const Action& action) {
  switch (dtype) {
    case LMI_F32:
      return action(float{});
    case LMI_BF16:
      return action(bf16{});
    default:
      return fail(std::string(name) + ": element type " + std::to_string(dtype) +
                  "; known are 0 (fp32), 1 (bf16)");
  }
}

// Calls action(X{}, Y{}) with the element types of operands and results: fp32 ones of either, or
// both in bf16.
template <typename Action>
int32_t with_operands(const char* name, int32_t x_dtype, int32_t y_dtype, const Action& action) {
  if (x_dtype == LMI_BF16 && y_dtype == LMI_BF16) return action(bf16{}, bf16{});
  if (x_dtype != LMI_F32) {
    return fail(std::string(name) + ": operands of element type " + std::to_string(x_dtype) +
                " for results of " + std::to_string(y_dtype) +
                "; 0 (fp32), and 1 (bf16) for the same can be had");
  }
  return with_dtype(name, y_dtype, [&](auto y) { return action(float{}, y); });
}

// Calls action(T{}) with the type of codes of that number, or other() if it is none.
template <typename Action, typename Other>
int32_t with_code(int32_t dtype, const Action& action, const Other& other) {
  switch (dtype) {
    case LMI_I8:
      return action(i8{});
    case LMI_E4M3:
      return action(e4m3{});
    case LMI_E5M2:
      return action(e5m2{});
    default:
      return other();
  }
}

template <typename Action>
int32_t with_bool(bool value, const Action& action) {
  return value ? action(std::true_type{}) : action(std::false_type{});
}

inline bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

}  // namespace lmi::cuda
