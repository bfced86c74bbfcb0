// Conversions between numpy arrays, lists and the engine's types.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/dtype.h"
#include "cpu/kernels.h"

namespace lmi {

using FloatArray = pybind11::array_t<float, pybind11::array::c_style>;

// The elements of an array of this size, or null.
inline const float* floats(const std::optional<FloatArray>& array, int64_t size, const char* what) {
  if (!array) return nullptr;
  LMI_CHECK(array->size() == size, what, " has ", array->size(), " elements, not ", size);
  return array->data();
}

inline DType parse_dtype(const std::string& name) {
  for (int i = 0; i < kNumDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    if (dtype != DType::kI32 && name == dtype_name(dtype)) return dtype;
  }
  LMI_CHECK(
      false, "unknown dtype '", name,
      "'; known are fp32, bf16, fp16, int8, int4, e4m3, e5m2, nf4, fp4 and GGUF's types of blocks");
  return DType::kF32;
}

inline cpu::Activation parse_activation(const std::string& name) {
  static constexpr const char* kNames[] = {"",     "silu",  "gelu_tanh",     "gelu",
                                           "relu", "relu2", "clamped_swiglu"};
  for (uint8_t i = 0; i < std::size(kNames); ++i) {
    if (name == kNames[i]) return static_cast<cpu::Activation>(i);
  }
  LMI_CHECK(false, "activation '", name,
            "'; known are silu, gelu_tanh, gelu, relu, relu2, "
            "clamped_swiglu");
  return cpu::Activation::kNone;
}

inline cpu::ExpertScoring parse_scoring(const std::string& name) {
  static constexpr const char* kNames[] = {"softmax", "sigmoid", "sparsemixer"};
  for (uint8_t i = 0; i < std::size(kNames); ++i) {
    if (name == kNames[i]) return static_cast<cpu::ExpertScoring>(i);
  }
  LMI_CHECK(false, "scoring '", name, "'; known are softmax, sigmoid, sparsemixer");
  return cpu::ExpertScoring::kSoftmax;
}

inline cpu::NormKind parse_norm(const std::string& name) {
  static constexpr const char* kNames[] = {"none", "rms", "layer"};
  for (uint8_t i = 0; i < std::size(kNames); ++i) {
    if (name == kNames[i]) return static_cast<cpu::NormKind>(i);
  }
  LMI_CHECK(false, "norm '", name, "'; known are none, rms, layer");
  return cpu::NormKind::kNone;
}

// fp32 and fp16 arrays are what they say, uint16 is bf16.
inline DType array_dtype(const pybind11::array& array) {
  const auto dtype = array.dtype();
  if (dtype.kind() == 'f' && dtype.itemsize() == 4) return DType::kF32;
  if (dtype.kind() == 'f' && dtype.itemsize() == 2) return DType::kF16;
  if (dtype.kind() == 'u' && dtype.itemsize() == 2) return DType::kBF16;
  LMI_CHECK(false, "array of dtype ", std::string(pybind11::str(dtype)),
            "; taken are float32, float16 and uint16 (bf16)");
  return DType::kF32;
}

// A C-contiguous matrix; throws otherwise.
inline void check_matrix(const pybind11::array& array, const char* what) {
  LMI_CHECK(array.ndim() == 2, what, " has ", array.ndim(), " dimensions, not 2");
  LMI_CHECK((array.flags() & pybind11::array::c_style) != 0, what, " is not contiguous");
}

// A numpy array over memory that owner keeps alive.
template <typename T>
pybind11::array_t<T> array_view(std::vector<pybind11::ssize_t> shape, const T* data,
                                pybind11::handle owner) {
  return pybind11::array_t<T>(std::move(shape), data, owner);
}

// A numpy array that keeps the items, which aren't copied.
template <typename T>
pybind11::array_t<T> array_of(std::vector<T>&& items) {
  auto kept = std::make_unique<std::vector<T>>(std::move(items));
  const T* data = kept->data();
  const auto size = static_cast<pybind11::ssize_t>(kept->size());
  const pybind11::capsule owner(kept.get(),
                                [](void* p) { delete static_cast<std::vector<T>*>(p); });
  (void)kept.release();
  return pybind11::array_t<T>(size, data, owner);
}

// A table of rows; format: "", or the type of blocks that its bytes are.
inline cpu::EmbedArgs table_args(const pybind11::array& table, const std::string& format) {
  if (format.empty()) {
    return {
        .table = table.data(), .table_dtype = array_dtype(table), .num_columns = table.shape(1)};
  }
  const DType dtype = parse_dtype(format);
  const cpu::BlockFormat blocks = cpu::block_format(dtype);
  LMI_CHECK(
      blocks.num_inputs != 0 && table.itemsize() == 1 && table.shape(1) % blocks.num_bytes == 0,
      "a table of ", format, " has rows of whole blocks, as bytes");
  return {.table = table.data(),
          .table_dtype = dtype,
          .num_columns = table.shape(1) / blocks.num_bytes * blocks.num_inputs};
}

}  // namespace lmi
