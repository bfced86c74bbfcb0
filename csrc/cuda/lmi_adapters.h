/* LoRA adapters of the C interface. */
#ifndef LMI_ADAPTERS_H_
#define LMI_ADAPTERS_H_

#include "cuda/lmi_cuda.h"

#ifdef __cplusplus
extern "C" {
#endif
/* What a LoRA adapter adds to some outputs of a linear: b (a x). */
typedef struct {
  uint64_t a;   /* [rank, num_inputs] in bf16, on 16 bytes */
  uint64_t b;   /* [num_outputs, rank], as a */
  int32_t rank; /* a multiple of 8; 0: there is no such part */
  int32_t first_output;
  int32_t num_outputs;
  int32_t unused;
} LmiLoraPart;
#define LMI_MAX_LORA_PARTS 3 /* query, key and value */

/* Neighbouring rows with one adapter. */
typedef struct {
  uint64_t parts; /* of the adapter: LmiLoraPart [num_linears, LMI_MAX_LORA_PARTS] */
  int32_t first_row;
  int32_t num_rows; /* at most LMI_MAX_FEW_ROWS; 0: there are none */
} LmiLoraTile;

/* y += what the adapters of the tiles' rows add to one linear. a x is rounded to dtype. A row's
 * result depends on that row alone. */
typedef struct {
  const void* x;   /* [num_rows, num_inputs] in dtype, bf16, on 16 bytes */
  float* y;        /* [num_rows, num_outputs] */
  float* partials; /* [num_rows, LMI_LORA_SPLIT_INPUTS' in num_inputs, LMI_MAX_LORA_PARTS, max_rank]
                      on 32 bytes: what is between, by parts of the inputs */
  const LmiLoraTile* tiles;
  int32_t num_tiles; /* at most 65535 */
  int32_t linear_id;
  int32_t num_inputs; /* a multiple of 8 */
  int32_t num_outputs;
  int32_t max_rank; /* a multiple of 8 */
  int32_t dtype;
} LmiLoraAdd;
#define LMI_LORA_SPLIT_INPUTS 2048
LMI_CUDA_API int32_t lmi_cuda_lora_add(const LmiLoraAdd* args, void* stream);

#ifdef __cplusplus
}
#endif
#endif
