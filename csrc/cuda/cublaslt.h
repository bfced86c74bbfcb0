// What we call of cuBLASLt, declared here: the library is opened at run time and needn't be there
// when this one is built or loaded. Names and numbers are those of cublasLt.h, versions 12 and 13.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__) && defined(__has_include)
#if __has_include(<cublasLt.h>)
#include <cublasLt.h>
#define LMI_HAS_CUBLASLT_HEADER 1
#endif
#endif

namespace lmi::cuda::cublaslt {

using Handle = void*;
using Description = void*;
using Layout = void*;
using Preference = void*;

constexpr int kFloat32 = 0;  // cudaDataType_t
constexpr int kInt8 = 3;
constexpr int kInt32 = 10;
constexpr int kBFloat16 = 14;
constexpr int kFloat8E4M3 = 28;
constexpr int kCompute32F = 68;  // cublasComputeType_t
constexpr int kCompute32I = 72;
constexpr int32_t kTransposed = 1;  // cublasOperation_t
constexpr int kTransposeA = 3;      // cublasLtMatmulDescAttributes_t
constexpr int kEpilogue = 7;
constexpr int kBiasPointer = 8;
constexpr uint32_t kEpilogueBias = 4;  // cublasLtEpilogue_t
constexpr int kMaxWorkspaceBytes = 1;  // cublasLtMatmulPreferenceAttributes_t
constexpr int kMinAlignmentA = 5;      // and B, C, D: bytes, a uint32_t each; 256 if not set
constexpr int kMinAlignmentD = 8;

struct Algorithm {
  uint64_t data[8];
};

struct Heuristic {
  Algorithm algorithm;
  size_t workspace_bytes;
  int status;
  float num_waves;
  int reserved[4];
};

#if defined(LMI_HAS_CUBLASLT_HEADER)
static_assert(kFloat32 == CUDA_R_32F && kBFloat16 == CUDA_R_16BF);
static_assert(kInt8 == CUDA_R_8I && kInt32 == CUDA_R_32I && kFloat8E4M3 == CUDA_R_8F_E4M3);
static_assert(kCompute32F == CUBLAS_COMPUTE_32F && kCompute32I == CUBLAS_COMPUTE_32I);
static_assert(kTransposed == CUBLAS_OP_T);
static_assert(kTransposeA == CUBLASLT_MATMUL_DESC_TRANSA);
static_assert(kEpilogue == CUBLASLT_MATMUL_DESC_EPILOGUE);
static_assert(kBiasPointer == CUBLASLT_MATMUL_DESC_BIAS_POINTER);
static_assert(kEpilogueBias == CUBLASLT_EPILOGUE_BIAS);
static_assert(kMaxWorkspaceBytes == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
static_assert(kMinAlignmentA == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
static_assert(kMinAlignmentA + 1 == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
static_assert(kMinAlignmentA + 2 == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
static_assert(kMinAlignmentD == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
static_assert(sizeof(Algorithm) == sizeof(cublasLtMatmulAlgo_t));
static_assert(sizeof(Heuristic) == sizeof(cublasLtMatmulHeuristicResult_t));
static_assert(offsetof(Heuristic, workspace_bytes) ==
              offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize));
static_assert(offsetof(Heuristic, status) == offsetof(cublasLtMatmulHeuristicResult_t, state));
#endif

// Each returns 0, or an error.
struct Functions {
  int (*create)(Handle*);
  int (*create_description)(Description*, int compute_type, int scale_type);
  int (*destroy_description)(Description);
  int (*set_description)(Description, int attribute, const void* value, size_t num_bytes);
  int (*create_layout)(Layout*, int type, uint64_t rows, uint64_t columns, int64_t stride);
  int (*destroy_layout)(Layout);
  int (*create_preference)(Preference*);
  int (*destroy_preference)(Preference);
  int (*set_preference)(Preference, int attribute, const void* value, size_t num_bytes);
  int (*find_algorithms)(Handle, Description, Layout a, Layout b, Layout c, Layout d, Preference,
                         int num_wanted, Heuristic*, int* num_found);
  int (*multiply)(Handle, Description, const void* alpha, const void* a, Layout, const void* b,
                  Layout, const void* beta, const void* c, Layout, void* d, Layout,
                  const Algorithm*, void* workspace, size_t workspace_bytes, void* stream);
};

}  // namespace lmi::cuda::cublaslt
