/* The CUDA kernels' C interface, with products in lmi_products.h and ranks in lmi_ranks.h: plain
 * arguments in, 0 or an error code out.
 *
 * Pointers are to device memory, unless a comment says host; matrices are row-major and contiguous.
 * Nothing is allocated, and nothing waits: a call puts kernels onto `stream` (a CUstream) of the
 * current device. A call that returns another value than 0 has launched nothing that it failed at,
 * and lmi_cuda_error says why. Every argument struct may be given on from many threads at once. */
#ifndef LMI_CUDA_H_
#define LMI_CUDA_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LMI_CUDA_VERSION 21 /* changes with any signature or struct here or in step_list.h */

#if defined(__GNUC__)
#define LMI_CUDA_API __attribute__((visibility("default")))
#else
#define LMI_CUDA_API
#endif

/* Element types: the numbers of lmi::DType, which has no e5m2 but fp16 (2). */
enum { LMI_F32 = 0, LMI_BF16 = 1, LMI_I8 = 3, LMI_E4M3 = 6, LMI_E5M2 = 7 };
enum {
  LMI_SILU = 0,
  LMI_GELU_TANH = 1,
  LMI_GELU = 2,
  LMI_RELU = 3,
  LMI_RELU2 = 4,          /* the square of relu */
  LMI_CLAMPED_SWIGLU = 5, /* gated alone: gate and up are clamped to 7 and -7 .. 7 before */
  LMI_SOFT_CAP = 6,       /* ungated alone, as what follows: cap tanh(x / cap) */
  LMI_CLIP = 7            /* between -cap and cap */
};
enum { LMI_NORM_NONE = 0, LMI_NORM_RMS = 1, LMI_NORM_LAYER = 2 };

LMI_CUDA_API int32_t lmi_cuda_version(void);
/* The text of this header and of step_list.h, as the library was compiled with them. */
LMI_CUDA_API const char* lmi_cuda_interface(void);
/* Of this thread's last call that failed. */
LMI_CUDA_API const char* lmi_cuda_error(void);
/* What a log should have, by its number from 0 on as it came up in this process; NULL: nothing so
 * far. From any thread; texts stay. */
LMI_CUDA_API const char* lmi_cuda_notice(int32_t number);
/* 0 if the current device can run the kernels: it exists, the driver is new enough, and there is
 * machine code for its architecture. */
LMI_CUDA_API int32_t lmi_cuda_check_device(void);
/* Whether kernels may start while the one before them ends, for all kernels from now on. Fails
 * where the current device doesn't have that. */
LMI_CUDA_API int32_t lmi_cuda_use_dependent_launch(int32_t is_used);
/* 1 if this is the tests' emulator of a device, to which host memory is device memory. */
LMI_CUDA_API int32_t lmi_cuda_is_emulator(void);

/* y = x / sqrt(mean(x^2) + eps) * weight over each row; `addend`, unless NULL, is added to x first,
 * in place. fp32 x, addend [num_rows, num_columns], weight [num_columns]; y in y_dtype. With codes,
 * y is quantised too, as quantize_rows does it, and needn't be stored. */
typedef struct {
  float* x;
  const float* addend;
  const float* weight;
  void* y; /* NULL: not stored */
  int32_t num_rows;
  int32_t num_columns; /* at most LMI_MAX_NORM_COLUMNS, a quarter where not a multiple of 4 */
  float eps;
  int32_t y_dtype;
  uint8_t* codes; /* this and what follows: of LmiQuantizeRows; NULL: none */
  float* scales;
  int32_t* outliers;
  int32_t stride;
  int32_t outlier_stride;
  int32_t code_type;
  float fixed_scale;
} LmiRmsNorm;
#define LMI_MAX_NORM_COLUMNS 16384
LMI_CUDA_API int32_t lmi_cuda_rms_norm(const LmiRmsNorm* args, void* stream);

/* y = weight (x - mean(x)) / sqrt(var(x) + eps) + bias over each of num_groups groups of columns of
 * a row, one after the other; LMI_NORM_RMS: with 0 for the mean; LMI_NORM_NONE: y = weight x +
 * bias. `addend`, unless NULL, is added to x first, in place. fp32 x, addend [num_rows, stride]; y
 * in y_dtype lies as x does and may be x. */
typedef struct {
  float* x;
  const float* addend;
  const float* weight; /* [num_groups, num_columns]; NULL: ones */
  const float* bias;   /* the same; NULL: zeros */
  void* y;             /* NULL: not stored */
  int32_t num_rows;
  int32_t num_groups;
  int32_t num_columns; /* as rms_norm's */
  int32_t stride;
  int32_t first_column; /* of the first group */
  int32_t kind;
  float eps;
  int32_t y_dtype;
} LmiNorm;
LMI_CUDA_API int32_t lmi_cuda_norm(const LmiNorm* args, void* stream);

/* y = act(gate) * up, of silu and gelu_tanh: gate_up [num_rows, 2 num_columns] in x_dtype, gate
 * before up, fp32 or, where y is and there are no codes, bf16; y [num_rows, num_columns] in
 * y_dtype. With codes as rms_norm, of at most LMI_MAX_CODED_COLUMNS, a quarter where not a multiple
 * of 4. */
typedef struct {
  const void* gate_up;
  void* y; /* NULL: not stored */
  int32_t num_rows;
  int32_t num_columns;
  int32_t activation;
  int32_t y_dtype;
  uint8_t* codes; /* this and what follows: of LmiQuantizeRows; NULL: none */
  float* scales;
  int32_t* outliers;
  int32_t stride;
  int32_t outlier_stride;
  int32_t code_type;
  float fixed_scale;
  int32_t x_dtype;
} LmiGatedActivation;
#define LMI_MAX_CODED_COLUMNS 32768
LMI_CUDA_API int32_t lmi_cuda_gated_activation(const LmiGatedActivation* args, void* stream);

/* The same of any activation, gated or not: y = act(x), of x [num_rows, num_columns] in x_dtype,
 * which y may be, unless is_gated. */
typedef struct {
  const void* x;
  void* y;
  int32_t num_rows;
  int32_t num_columns;
  int32_t activation;
  int32_t is_gated;
  float cap;
  int32_t y_dtype;
  int32_t x_dtype;
} LmiActivation;
LMI_CUDA_API int32_t lmi_cuda_activation(const LmiActivation* args, void* stream);

/* Norm (where q_norm, k_norm [head_dim] aren't NULL) and rotate query and key heads; queries go to
 * q [num_tokens, num_q_heads, head_dim] in q_dtype, keys and values to their slots of one layer's
 * [slots, num_kv_heads, head_dim] in kv_dtype. qkv: fp32 [num_tokens, num_q_heads +
 * 2 num_kv_heads, head_dim]; cos, sin: fp32 [positions, half_rotary]; dimension i < half_rotary
 * turns with i + half_rotary. Where `values` is NULL, keys are the values, too, and qkv has none.
 * `latent`, unless NULL: [num_tokens, head_dim] in qkv_dtype, the one key head, which qkv hasn't
 * then; without values.
 *
 * int8: codes of a head are multiples of a 127th of its largest magnitude, which goes to
 * key_scales and value_scales [slots, num_kv_heads]. e4m3, e5m2: codes are heads divided by
 * key_scale or value_scale; what is too large becomes the largest. Heads with elements that aren't
 * finite aren't when read either. */
typedef struct {
  const void* qkv; /* in qkv_dtype: fp32, or bf16 where q is */
  void* q;
  void* keys;
  void* values;
  const int32_t* positions;
  const int32_t* slots;
  const float* cos;
  const float* sin;
  const float* q_norm;
  const float* k_norm;
  int32_t num_tokens;
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t half_rotary;
  float norm_eps;
  int32_t q_dtype;
  int32_t kv_dtype;
  float* key_scales;
  float* value_scales;
  float key_scale;
  float value_scale;
  int32_t qkv_dtype;
  const void* latent;
} LmiRopeCacheWrite;
LMI_CUDA_API int32_t lmi_cuda_rope_cache_write(const LmiRopeCacheWrite* args, void* stream);

/* y[row] = scale * table[ids[row] + offset], or that much more if it adds: table [any, num_columns]
 * in table_dtype, y fp32 [num_rows, num_columns]. Ids plus the offset must be rows of the table. */
typedef struct {
  const void* table;
  const int32_t* ids;
  float* y;
  int32_t num_rows;
  int32_t num_columns;
  float scale;
  int32_t table_dtype;
  int32_t offset;
  int32_t adds;
} LmiGatherRows;
LMI_CUDA_API int32_t lmi_cuda_gather_rows(const LmiGatherRows* args, void* stream);

/* Block src[i] to block dst[i] in each of num_layers stores, which lie layer_bytes apart; no block
 * is both read and written. block_bytes: a multiple of 16. */
typedef struct {
  void* store;
  const int32_t* src;
  const int32_t* dst;
  int64_t layer_bytes;
  int64_t block_bytes;
  int32_t num_layers;
  int32_t num_copies;
} LmiCopyBlocks;
LMI_CUDA_API int32_t lmi_cuda_copy_blocks(const LmiCopyBlocks* args, void* stream);

/* Decoding: keys begin .. end of the sequence; the result is final, or, unless num_partials is 0,
 * partial number `partial` of those from first_partial on, which are put together in this order; an
 * entry without keys is no work. Prefilling: rows begin .. end of the sequence, counted from its
 * first of the step. */
typedef struct {
  int32_t seq;
  int32_t begin;
  int32_t end;
  int32_t partial;
  int32_t first_partial;
  int32_t num_partials;
} LmiAttentionWork;

/* On the host, and all its pointers too: the work of a step's attention. Sequences of one row are
 * decoded, those of more prefilled, or all of them, so that a row's sums have one order. */
typedef struct {
  const int32_t* num_rows;   /* [num_seqs] */
  const int32_t* kv_lengths; /* [num_seqs], with the rows of the step */
  int32_t num_seqs;
  int32_t num_q_heads; /* at most 128 times num_kv_heads; 64, 1024: of heads over 128, 256 */
  int32_t num_kv_heads;
  int32_t head_dim;     /* at most 576, a multiple of 8 */
  int32_t window;       /* keys that a query sees, its own among them; 0: all */
  int32_t num_slots;    /* blocks that the device runs at once, and decodes should be split for */
  int32_t split_tokens; /* 0: as num_slots wants; else a multiple of 64 */
  int32_t prefills_all; /* also sequences of one row */
  int32_t capacity;     /* of each of the lists */
  LmiAttentionWork* decode;
  LmiAttentionWork* prefill;
  int32_t num_decode; /* from here on results */
  int32_t num_prefill;
  int32_t num_partials;
} LmiAttentionLists;
LMI_CUDA_API int32_t lmi_cuda_list_attention(LmiAttentionLists* lists, void* stream);

/* Causal attention over one layer of the paged cache, y = softmax(scale q k^T) v with grouped
 * queries: q, y [tokens, num_q_heads, head_dim] in dtype, bf16, keys, values [slots,
 * num_kv_heads, head_dim] in kv_dtype, which is dtype or one of 8 bits; all on 16 bytes; scale
 * above 0. soft_cap, unless 0: scores become soft_cap tanh(score / soft_cap). int8: keys and values
 * are multiples of key_scales and value_scales [slots, num_kv_heads]. Results are multiples of
 * value_scale, which is 1 but for e4m3 and e5m2; the one of keys is to be part of scale. Scores
 * lose their head's slope, unless NULL, for each position from the query back to the key, behind
 * the cap; of the softmax, a head's sink has the share of a score of that size. Heads over 256 are
 * those of one KV head, keys their values, without window, cap, slopes and sinks. */
typedef struct {
  const void* q;
  const void* keys;
  const void* values;
  void* y;
  const int32_t* first_rows;   /* [num_seqs] */
  const int32_t* num_rows;     /* [num_seqs] */
  const int32_t* kv_lengths;   /* [num_seqs] */
  const int32_t* block_tables; /* [num_seqs, table_stride] */
  const LmiAttentionWork* work;
  float* partials;   /* decoding only: [num_partials, num_q_heads, head_dim] */
  float* log_masses; /* decoding only: [num_partials, num_q_heads] */
  int32_t* arrivals; /* as many; zeros, which they are again afterwards */
  int32_t num_work;
  int32_t table_stride;
  int32_t block_size;
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t window;
  float scale;
  float soft_cap;
  int32_t dtype;
  int32_t kv_dtype;
  float value_scale;
  const float* key_scales;
  const float* value_scales;
  const float* slopes; /* [num_q_heads]; NULL: none; of 16-bit caches alone */
  const float* sinks;  /* the same */
} LmiAttention;
LMI_CUDA_API int32_t lmi_cuda_decode_attention(const LmiAttention* args, void* stream);
LMI_CUDA_API int32_t lmi_cuda_prefill_attention(const LmiAttention* args, void* stream);

/* What a logit row asks for; neutral: temperature 0 (greedy), top_k 0, top_p 1, min_p 0,
 * typical_p 1, repetition_penalty 1, other penalties 0. */
typedef struct {
  uint64_t seed;
  int32_t choice;
  int32_t position;
  int32_t is_sampled;
  int32_t target_id; /* >= 0: its log-probability is reported, nothing sampled */
  int32_t num_top;   /* at most max_top */
  int32_t top_k;
  int32_t mask; /* its number, or -1 */
  float temperature;
  float top_p;
  float min_p;
  float typical_p;
  float repetition_penalty;
  float presence_penalty;
  float frequency_penalty;
} LmiSampleRow;

/* Changes of logits: entries offsets[row] .. offsets[row + 1] are the row's. */
typedef struct {
  const int32_t* offsets; /* [num_rows + 1] */
  const int32_t* ids;
  const float* values;
} LmiEdits;

/* A token for every row by the rules of csrc/cpu/isa/sample.inc: log-probabilities are those of the
 * logits as they are; the token is drawn after bias, penalties, bans, mask, temperature, top-k,
 * top-p over what that left, min-p, typical-p over what these left. A row with a NaN or infinite
 * logit gets no token and no top ones. Draws go through the kept tokens in order of ids and depend
 * on nothing but the row. */
typedef struct {
  const float* logits; /* [num_rows, vocab_size] */
  float* modified;     /* the same, written; NULL if no row has edits, which aren't read then */
  const LmiSampleRow* rows;
  LmiEdits biases; /* added */
  LmiEdits seen;   /* values: how often generated; 0: only in the prompt. Ids differ in a row. */
  LmiEdits bans;   /* no values */
  const uint32_t* masks; /* [masks, num_mask_words]: bits of the tokens allowed, low ones first */
  int32_t* token_ids;    /* [num_rows]; -1: none */
  float* logprobs;       /* [num_rows], of the token or target */
  int32_t* num_top;      /* [num_rows] */
  int32_t* target_ranks; /* [num_rows], from 1, lower ids first among equals; 0: no target */
  int32_t* top_ids;      /* [num_rows, max_top], best first */
  float* top_logprobs;   /* [num_rows, max_top] */
  int32_t num_rows;
  int32_t vocab_size;
  int32_t max_top; /* at most LMI_MAX_TOP */
  int32_t num_mask_words;
} LmiSample;
#define LMI_MAX_TOP 1024
LMI_CUDA_API int32_t lmi_cuda_sample(const LmiSample* args, void* stream);

#include "cuda/lmi_experts.h"
#include "cuda/lmi_products.h"
#include "cuda/lmi_ranks.h"

#ifdef __cplusplus
}
#endif
#endif
