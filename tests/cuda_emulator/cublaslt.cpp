// cuBLASLt's functions on host memory, as its documentation defines them, for what linear_dense.cu
// asks for: column-major matrices, A transposed or not, fp32 results, a bias per row of D; of int8
// matrices int32 results; int8 and fp8 ones only with A transposed and whole vectors of them.
#include "cuda/cublaslt.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "common/dtype.h"
#include "cuda/device.cuh"

using namespace lmi;
using namespace lmi::cuda;

namespace {

constexpr int kInvalidValue = 7;
constexpr int kNotSupported = 15;

struct MatmulDescription {
  int compute;
  int32_t is_transposed = 0;
  uint32_t epilogue = 1;
  const float* bias = nullptr;
};

struct MatrixLayout {
  int type;
  uint64_t rows;
  uint64_t columns;
  int64_t stride;
};

struct MatmulPreference {
  uint64_t max_workspace_bytes = 0;
  uint32_t min_alignments[4] = {256, 256, 256, 256};
};

bool is_aligned(const void* pointer, uint64_t alignment) {
  return reinterpret_cast<uintptr_t>(pointer) % alignment == 0;
}

float element(const MatrixLayout& layout, const void* data, uint64_t row, uint64_t column) {
  const uint64_t at = column * static_cast<uint64_t>(layout.stride) + row;
  switch (layout.type) {
    case cublaslt::kFloat32:
      return static_cast<const float*>(data)[at];
    case cublaslt::kInt8:
      return static_cast<const int8_t*>(data)[at];
    case cublaslt::kFloat8E4M3:
      return float8_value<3>(static_cast<const uint8_t*>(data)[at]);
    default:
      return bf16_to_float(static_cast<const uint16_t*>(data)[at]);
  }
}

// What the documentation wants of matrices of codes: dimensions, of A as it is stored, that are
// multiples of 4 (int8) or 16 (fp8).
bool is_supported(const MatmulDescription& how, const MatrixLayout& a, const MatrixLayout& d) {
  const bool is_int8 = a.type == cublaslt::kInt8;
  if (is_int8 != (how.compute == cublaslt::kCompute32I)) return false;
  const bool is_narrow = d.type == cublaslt::kBFloat16 && a.type == cublaslt::kBFloat16;
  if (is_narrow && how.epilogue == cublaslt::kEpilogueBias) return false;
  if (d.type != (is_int8 ? cublaslt::kInt32 : cublaslt::kFloat32) && !is_narrow) return false;
  if (!is_int8 && a.type != cublaslt::kFloat8E4M3) return true;
  const uint64_t unit = is_int8 ? 4 : 16;
  return how.is_transposed != 0 && a.rows % unit == 0 && a.columns % unit == 0 &&
         static_cast<uint64_t>(a.stride) % unit == 0;
}

// Columns one after the other, or rows.
std::vector<float> vectors_of(const MatrixLayout& layout, const void* data, bool is_by_row) {
  std::vector<float> values(layout.rows * layout.columns);
  for (uint64_t column = 0; column < layout.columns; ++column) {
    for (uint64_t row = 0; row < layout.rows; ++row) {
      values[is_by_row ? row * layout.columns + column : column * layout.rows + row] =
          element(layout, data, row, column);
    }
  }
  return values;
}

// alpha (A B)[row, column] and the bias, stored as D is.
template <typename Sum>
void multiply(const MatmulDescription& how, Sum alpha, const void* a, const MatrixLayout& left,
              const void* b, const MatrixLayout& right, void* d, const MatrixLayout& result) {
  const std::vector<float> weights = vectors_of(left, a, how.is_transposed == 0);
  const std::vector<float> x = vectors_of(right, b, false);
  for (uint64_t column = 0; column < result.columns; ++column) {
    for (uint64_t row = 0; row < result.rows; ++row) {
      Sum sum = 0;
      for (uint64_t i = 0; i < right.rows; ++i) {
        sum += static_cast<Sum>(weights[row * right.rows + i] * x[column * right.rows + i]);
      }
      sum *= alpha;
      if (how.epilogue == cublaslt::kEpilogueBias) sum += static_cast<Sum>(how.bias[row]);
      const uint64_t at = column * static_cast<uint64_t>(result.stride) + row;
      if (result.type == cublaslt::kBFloat16) {
        static_cast<uint16_t*>(d)[at] = float_to_bf16(static_cast<float>(sum));
      } else {
        static_cast<Sum*>(d)[at] = sum;
      }
    }
  }
}

template <typename Value>
int set_value(Value& target, const void* value, size_t num_bytes) {
  if (num_bytes != sizeof(Value)) return kInvalidValue;
  std::memcpy(&target, value, num_bytes);
  return 0;
}

int num_heuristics = 0;

constexpr int kMaxAlgorithms = 8;
constexpr int kAlgorithmId = 5;  // of an algorithm's data
int num_algorithms = 1;
int costs_ms[kMaxAlgorithms] = {};
int num_products[kMaxAlgorithms] = {};

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// For tests: how often an algorithm was asked for.
EXPORTED int cublaslt_num_heuristics() { return num_heuristics; }

// For tests: so many algorithms, and how long a product takes with each at least.
EXPORTED void cublaslt_set_costs(const int* milliseconds, int count) {
  num_algorithms = std::clamp(count, 1, kMaxAlgorithms);
  std::copy_n(milliseconds, num_algorithms, costs_ms);
  std::fill_n(num_products, kMaxAlgorithms, 0);
}
// How many products were made with one since then.
EXPORTED int cublaslt_num_products(int algorithm) { return num_products[algorithm]; }

EXPORTED int cublasLtCreate(cublaslt::Handle* handle) {
  static int one = 0;
  *handle = &one;
  return 0;
}

EXPORTED int cublasLtMatmulDescCreate(cublaslt::Description* made, int compute, int scale) {
  const bool is_int8 = compute == cublaslt::kCompute32I && scale == cublaslt::kInt32;
  const bool is_float = compute == cublaslt::kCompute32F && scale == cublaslt::kFloat32;
  if (!is_int8 && !is_float) return kNotSupported;
  *made = new MatmulDescription{compute};
  return 0;
}

EXPORTED int cublasLtMatmulDescDestroy(cublaslt::Description description) {
  delete static_cast<MatmulDescription*>(description);
  return 0;
}

EXPORTED int cublasLtMatmulDescSetAttribute(cublaslt::Description description, int attribute,
                                            const void* value, size_t num_bytes) {
  auto& target = *static_cast<MatmulDescription*>(description);
  switch (attribute) {
    case cublaslt::kTransposeA:
      return set_value(target.is_transposed, value, num_bytes);
    case cublaslt::kEpilogue:
      return set_value(target.epilogue, value, num_bytes);
    case cublaslt::kBiasPointer:
      return set_value(target.bias, value, num_bytes);
    default:
      return kInvalidValue;
  }
}

EXPORTED int cublasLtMatrixLayoutCreate(cublaslt::Layout* made, int type, uint64_t rows,
                                        uint64_t columns, int64_t stride) {
  if (stride < static_cast<int64_t>(rows)) return kInvalidValue;
  *made = new MatrixLayout{type, rows, columns, stride};
  return 0;
}

EXPORTED int cublasLtMatrixLayoutDestroy(cublaslt::Layout layout) {
  delete static_cast<MatrixLayout*>(layout);
  return 0;
}

EXPORTED int cublasLtMatmulPreferenceCreate(cublaslt::Preference* made) {
  *made = new MatmulPreference;
  return 0;
}

EXPORTED int cublasLtMatmulPreferenceDestroy(cublaslt::Preference preference) {
  delete static_cast<MatmulPreference*>(preference);
  return 0;
}

EXPORTED int cublasLtMatmulPreferenceSetAttribute(cublaslt::Preference preference, int attribute,
                                                  const void* value, size_t num_bytes) {
  auto& target = *static_cast<MatmulPreference*>(preference);
  if (attribute >= cublaslt::kMinAlignmentA && attribute <= cublaslt::kMinAlignmentD) {
    return set_value(target.min_alignments[attribute - cublaslt::kMinAlignmentA], value, num_bytes);
  }
  if (attribute != cublaslt::kMaxWorkspaceBytes) return kInvalidValue;
  return set_value(target.max_workspace_bytes, value, num_bytes);
}

// Rows of more than 1000 inputs want a workspace; algorithms want all the alignment that there is.
EXPORTED int cublasLtMatmulAlgoGetHeuristic(cublaslt::Handle, cublaslt::Description description,
                                            cublaslt::Layout a, cublaslt::Layout, cublaslt::Layout,
                                            cublaslt::Layout d, cublaslt::Preference preference,
                                            int num_wanted, cublaslt::Heuristic* found,
                                            int* num_found) {
  ++num_heuristics;
  *num_found = 0;
  if (num_wanted < 1) return kInvalidValue;
  const auto& layout = *static_cast<const MatrixLayout*>(a);
  if (!is_supported(*static_cast<const MatmulDescription*>(description), layout,
                    *static_cast<const MatrixLayout*>(d))) {
    return kNotSupported;
  }
  const auto& preferred = *static_cast<const MatmulPreference*>(preference);
  const size_t wanted = layout.rows > 1000 ? 4096 : 0;
  if (wanted > preferred.max_workspace_bytes) return kNotSupported;
  *num_found = std::min(num_wanted, num_algorithms);
  for (int i = 0; i < *num_found; ++i) {
    found[i] = {};
    found[i].workspace_bytes = wanted;
    found[i].algorithm.data[0] = layout.columns;
    std::copy_n(preferred.min_alignments, 4, found[i].algorithm.data + 1);
    found[i].algorithm.data[kAlgorithmId] = static_cast<uint64_t>(i);
  }
  return 0;
}

EXPORTED int cublasLtMatmul(cublaslt::Handle, cublaslt::Description description, const void* alpha,
                            const void* a, cublaslt::Layout a_layout, const void* b,
                            cublaslt::Layout b_layout, const void* beta, const void* c,
                            cublaslt::Layout, void* d, cublaslt::Layout d_layout,
                            const cublaslt::Algorithm* algorithm, void*, size_t, void*) {
  const auto& how = *static_cast<const MatmulDescription*>(description);
  const auto& left = *static_cast<const MatrixLayout*>(a_layout);
  const auto& right = *static_cast<const MatrixLayout*>(b_layout);
  const auto& result = *static_cast<const MatrixLayout*>(d_layout);
  const uint64_t rows = how.is_transposed ? left.columns : left.rows;
  const uint64_t inner = how.is_transposed ? left.rows : left.columns;
  if (inner != right.rows || rows != result.rows || right.columns != result.columns ||
      left.type != right.type || !is_supported(how, left, result) ||
      algorithm->data[0] != left.columns || *static_cast<const uint32_t*>(beta) != 0) {
    return kInvalidValue;
  }
  const uint64_t id = algorithm->data[kAlgorithmId];
  ++num_products[id];
  if (costs_ms[id] > 0) std::this_thread::sleep_for(std::chrono::milliseconds(costs_ms[id]));
  const void* matrices[] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) {
    if (!is_aligned(matrices[i], algorithm->data[1 + i])) return kInvalidValue;
  }
  if (left.type == cublaslt::kInt8) {
    multiply(how, *static_cast<const int32_t*>(alpha), a, left, b, right, d, result);
  } else {
    multiply(how, *static_cast<const float*>(alpha), a, left, b, right, d, result);
  }
  return 0;
}
