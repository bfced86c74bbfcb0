/* Products of the C interface, a part of lmi_cuda.h, which includes it. */
#ifndef LMI_PRODUCTS_H_
#define LMI_PRODUCTS_H_

/* y = x weight^T + bias for few rows: x [num_rows, num_inputs], weight [num_outputs, num_inputs] in
 * dtype, bf16, both on 16 bytes; bias (NULL: none) fp32; y in y_dtype, fp32 or bf16. A row's result
 * depends on that row alone. */
typedef struct {
  const void* x;
  const void* weight;
  const float* bias;
  void* y;
  int32_t num_rows; /* at most LMI_MAX_FEW_ROWS */
  int32_t num_outputs;
  int32_t num_inputs; /* a multiple of 8 */
  int32_t dtype;
  int32_t y_dtype;
} LmiLinear;
#define LMI_MAX_FEW_ROWS 8
LMI_CUDA_API int32_t lmi_cuda_linear_few_rows(const LmiLinear* args, void* stream);

/* Opens cuBLASLt, versions 12 and 13, by what dlopen takes, unless it is open already. */
LMI_CUDA_API int32_t lmi_cuda_open_cublaslt(const char* path);

/* The same by cuBLASLt, which must be open, for any number of rows. A shape's first product asks
 * for the best algorithm that the workspace allows, which the host waits for; how a row is summed
 * may depend on the number of rows, and on the alignment of x, weight and y. Shapes without an
 * algorithm are linear_tiled's, which a notice says once per weight's shape. Calls take turns. */
typedef struct {
  const void* x;
  const void* weight;
  const float* bias; /* on 16 bytes; NULL where y isn't fp32 */
  void* y;
  void* workspace; /* on 256 bytes; for no other stream */
  int64_t workspace_bytes;
  int32_t num_rows;
  int32_t num_outputs;
  int32_t num_inputs;
  int32_t y_stride; /* numbers between rows of y, at least num_outputs */
  int32_t dtype;
  int32_t y_dtype;
} LmiLinearDense;
LMI_CUDA_API int32_t lmi_cuda_linear_dense(const LmiLinearDense* args, void* stream);
/* The same by a plain kernel of any shape; without a workspace. */
LMI_CUDA_API int32_t lmi_cuda_linear_tiled(const LmiLinearDense* args, void* stream);

/* As linear_few_rows for any number of rows, each times the matrix of its expert: rows of y are
 * sorted by expert. How a row is summed depends on the numbers of rows and experts, unless
 * in_tiles. */
typedef struct {
  const void* x;             /* in dtype, bf16, on 16 bytes */
  const float* bias;         /* [num_experts, num_outputs]; NULL: none */
  float* y;                  /* [num_rows, num_outputs] */
  const uint64_t* matrices;  /* [num_experts]: where each lies, on 16 bytes */
  const int32_t* first_rows; /* of group_rows */
  const int32_t* token_rows; /* of group_rows: the row of x for each of y; NULL: the same */
  int32_t num_experts;
  int32_t num_rows;
  int32_t num_outputs;
  int32_t num_inputs; /* a multiple of 8 */
  int32_t dtype;
  int32_t in_tiles; /* few rows, too */
} LmiLinearExperts;
LMI_CUDA_API int32_t lmi_cuda_linear_experts(const LmiLinearExperts* args, void* stream);

/* Each head's columns times its own matrix: x [num_rows, num_heads num_inputs] in dtype, bf16 -> y
 * [num_rows, num_heads num_outputs] in y_dtype, fp32 or bf16. How a row is summed depends on the
 * number of rows. */
typedef struct {
  const void* x;
  void* y;
  const uint64_t* matrices; /* [num_heads]: where each lies, on 16 bytes */
  int32_t num_heads;        /* at most 65535 */
  int32_t num_rows;
  int32_t num_outputs;
  int32_t num_inputs;
  int32_t dtype;
  int32_t y_dtype;
} LmiHeadLinear;
LMI_CUDA_API int32_t lmi_cuda_head_linear(const LmiHeadLinear* args, void* stream);

/* As linear_few_rows for any number of rows and a weight in int4 panels (csrc/cpu/kernels.h).
 * Outputs of a gated one come out as gate before up; num_outputs counts both. More rows than
 * max_packed_rows, with room to unpack the weight into, take linear_dense's way: weights are
 * rounded to dtype, once, and how a row is summed depends on the number of rows. Fewer rows'
 * results depend on nothing but the row. The workspace also takes sums of parts of the inputs,
 * where outputs are few; without room for them the same results take longer.
 */
typedef struct {
  const void* x;
  const void* panels; /* on 16 bytes */
  const float* bias;
  float* y;
  void* unpacked;         /* on 256 bytes; for no other stream; NULL: no room */
  int64_t unpacked_bytes; /* at least 64 outputs' 16-bit weights */
  void* workspace;        /* linear_dense's */
  int64_t workspace_bytes;
  const uint64_t* matrices; /* this and what follows: of LmiLinearExperts; NULL: one matrix */
  const int32_t* first_rows;
  const int32_t* token_rows;
  int32_t num_experts;
  int32_t max_packed_rows;
  int32_t num_rows;
  int32_t num_outputs;
  int32_t num_inputs; /* a multiple of 8 */
  int32_t group_size; /* 32, 64 or 128 */
  int32_t is_gated;
  int32_t dtype;
} LmiLinearPacked;
LMI_CUDA_API int32_t lmi_cuda_linear_packed(const LmiLinearPacked* args, void* stream);

/* Rows quantised each on its own: code = x / scale in code_type, LMI_I8 or LMI_E4M3, rounded to
 * nearest, ties to even, where scale = largest magnitude / 127 or 448, or, of LMI_E4M3,
 * fixed_scale, beyond which codes are the largest: 0 for a row of (next to) zeros, NaN for one that
 * isn't finite, and codes 0 in both. With outliers, of LMI_I8 only, the scale is the one that
 * RowRounding of csrc/cpu/kernels.h says, and x = scale * (code + 256 high), where a row's list has
 * what isn't 0 of high: their number, then column << 8 | high as a byte of each, in any order. */
typedef struct {
  const void* x;     /* [num_rows, num_columns] in dtype */
  uint8_t* codes;    /* [num_rows, stride], zeros past the columns; on 16 bytes */
  float* scales;     /* [num_rows] */
  int32_t* outliers; /* [num_rows, outlier_stride]; NULL: none */
  int32_t num_rows;
  int32_t num_columns;
  int32_t stride;         /* a multiple of LMI_CODE_STRIDE */
  int32_t outlier_stride; /* 1 + num_columns / 32 */
  int32_t dtype;
  int32_t code_type;
  float fixed_scale; /* 0: each row has its own */
} LmiQuantizeRows;
#define LMI_CODE_STRIDE 128
LMI_CUDA_API int32_t lmi_cuda_quantize_rows(const LmiQuantizeRows* args, void* stream);

/* y = x weight^T + bias of rows as quantize_rows gives them and a weight in panels of the same
 * code_type: sums times both scales. int8 (csrc/cpu/kernels.h): sums are exact, so a row's result
 * depends on that row alone. e4m3: the same panels of other bytes, or, with group_size 128, such
 * panels for every 128 inputs one after the other; products of 128 inputs are summed as the device
 * does it, those sums in fp32. More rows than max_panel_rows, with room for the weight's codes as
 * rows, are cuBLASLt's, which must be open, unless there are groups or it has no algorithm: of int8
 * with the same results, of e4m3 summed as it does it. */
typedef struct {
  const uint8_t* codes;
  const float* row_scales;
  const int32_t* outliers; /* of quantize_rows; NULL: none */
  const void* panels;      /* on 16 bytes */
  const float* bias;       /* NULL: none */
  float* y;                /* [num_rows, num_outputs], gate before up */
  void* unpacked;          /* on 256 bytes; for no other stream; NULL: no room */
  int64_t unpacked_bytes;  /* at least 64 outputs' rows of `stride` bytes */
  void* workspace;         /* linear_dense's */
  int64_t workspace_bytes;
  const uint64_t* matrices; /* this and what follows: of LmiLinearExperts; NULL: one matrix */
  const int32_t* first_rows;
  const int32_t* token_rows;
  int32_t num_experts;
  int32_t max_panel_rows;
  int32_t num_rows;
  int32_t num_outputs;
  int32_t num_inputs; /* int8: at most 65536 */
  int32_t stride;
  int32_t outlier_stride;
  int32_t group_size; /* inputs per scale; 0: a scale per output */
  int32_t is_gated;
  int32_t code_type;
} LmiLinearQuantized;
LMI_CUDA_API int32_t lmi_cuda_linear_quantized(const LmiLinearQuantized* args, void* stream);

#endif
