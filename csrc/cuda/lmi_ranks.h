/* Ranks of the C interface, a part of lmi_cuda.h, which includes it: processes with a device each
 * that compute one model and meet by NCCL. All of them call the same, in one order. */
#ifndef LMI_RANKS_H_
#define LMI_RANKS_H_

/* Opens NCCL, version 2, by what dlopen takes, unless it is open already. */
LMI_CUDA_API int32_t lmi_cuda_open_nccl(const char* path);

/* What a group's ranks are given to find one another, made by one of them: so many bytes. */
#define LMI_RANKS_ID_BYTES 128
LMI_CUDA_API int32_t lmi_cuda_make_ranks_id(void* id);
/* Waits until all ranks are there, each with its device. */
LMI_CUDA_API int32_t lmi_cuda_join_ranks(const void* id, int32_t num_ranks, int32_t rank,
                                         int32_t device, void** ranks);
/* From any thread, once: whatever is asked of these ranks fails from now on, and what waits for
 * another rank on the device comes to an end. NCCL then waits, and this function with it, until the
 * graphs that these ranks are in are destroyed and the other ranks' processes are gone, or do the
 * same. An error where a call of NCCL in another thread doesn't come back: it may be stuck for
 * ever, and only the end of the process ends it. */
LMI_CUDA_API int32_t lmi_cuda_abort_ranks(void* ranks);
/* Once the former has returned. */
LMI_CUDA_API void lmi_cuda_leave_ranks(void* ranks);

/* x becomes the sum of all ranks' x: fp32 [num_rows, num_columns]. */
typedef struct {
  void* ranks;
  float* x;
  int32_t num_rows;
  int32_t num_columns;
} LmiAllReduce;
LMI_CUDA_API int32_t lmi_cuda_all_reduce(const LmiAllReduce* args, void* stream);

/* This rank's part of the means of squares over all heads of queries and over all of keys: fp32
 * means [num_rows, 2], of the first num_q columns of fp32 x [num_rows, stride] and of the num_k
 * behind them. Summed over the ranks it is these means; several ranks may have the same keys. */
typedef struct {
  const float* x;
  float* means;
  int32_t num_rows;
  int32_t stride;
  int32_t num_q;
  int32_t num_k;
  int32_t num_ranks;
} LmiSquareHeads;
LMI_CUDA_API int32_t lmi_cuda_square_heads(const LmiSquareHeads* args, void* stream);

/* The same columns of x times weight / sqrt(means + eps), in place. */
typedef struct {
  float* x;
  const float* means;
  const float* weight; /* [num_q + num_k] */
  int32_t num_rows;
  int32_t stride;
  int32_t num_q;
  int32_t num_k;
  float eps;
} LmiScaleHeads;
LMI_CUDA_API int32_t lmi_cuda_scale_heads(const LmiScaleHeads* args, void* stream);

/* y [num_rows, num_columns] has all ranks' x side by side: fp32 x [num_rows, this rank's columns],
 * in memory for most_columns; rank i has columns first_columns[i] .. first_columns[i + 1]. */
typedef struct {
  void* ranks;
  const float* x;
  float* parts; /* [ranks, num_rows, most_columns] */
  float* y;     /* NULL: this rank wants nothing */
  const int32_t* first_columns;
  int32_t num_rows;
  int32_t num_columns;
  int32_t most_columns;
} LmiGatherColumns;
LMI_CUDA_API int32_t lmi_cuda_gather_columns(const LmiGatherColumns* args, void* stream);

/* Ids become rank 0's: [num_rows]. */
typedef struct {
  void* ranks;
  int32_t* token_ids;
  int32_t num_rows;
} LmiShareTokens;
LMI_CUDA_API int32_t lmi_cuda_share_tokens(const LmiShareTokens* args, void* stream);

#endif
