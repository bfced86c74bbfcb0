/* Steps of a model behind the C interface: a list of kernels recorded once, which a call launches
 * for the counts of a step, with the step's arrays in one upload and the results in one download.
 *
 * A list has a stream of its own. One thread at a time runs and captures; others may wait. Lists
 * whose ranks share tokens run and capture the same in one order; only rank 0's samples.
 * Functions return 0, or an error whose text lmi_cuda_error has. */
#ifndef LMI_CUDA_STEP_LIST_H_
#define LMI_CUDA_STEP_LIST_H_

#include "cuda/lmi_adapters.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct LmiStepList LmiStepList;

/* Steps that may be under way or not yet waited for. */
#define LMI_STEP_SLOTS 4

/* The most that a step has, and what plans and captures go by. */
typedef struct {
  int32_t device;
  int32_t max_tokens;
  int32_t max_seqs;
  int32_t max_logit_rows;
  int32_t max_copies;
  int32_t max_blocks_per_seq;
  int32_t block_size;
  int32_t max_top;             /* at most LMI_MAX_TOP */
  int32_t num_attention_slots; /* LmiAttentionLists::num_slots */
  int32_t split_tokens;        /* LmiAttentionLists::split_tokens */
  int32_t experts_per_token;   /* that many LMI_EXPERT_ROWS has each; 0: the model has none */
  int32_t scratch_block;       /* a block of no sequence: of captured rows that stand for none */
  int32_t num_misses; /* steps that are launched kernel by kernel before theirs is captured */
  /* Decode steps are captured for so many rows and up to so many keys, ascending; none: never. */
  const int32_t* row_counts;
  const int32_t* key_counts;
  int32_t num_row_counts;
  int32_t num_key_counts;
} LmiStepSizes;
LMI_CUDA_API int32_t lmi_cuda_step_list_create(const LmiStepSizes* sizes, LmiStepList** list);
/* Waits for what is under way. */
LMI_CUDA_API void lmi_cuda_step_list_destroy(LmiStepList* list);

/* What a node takes from the step is left out of its arguments: its row count, and what the
 * comments name. */
enum {
  LMI_NODE_COPY_BLOCKS = 0,       /* LmiCopyBlocks: src, dst, num_copies; before all other nodes */
  LMI_NODE_EMBED = 1,             /* LmiGatherRows: ids, the step's token ids */
  LMI_NODE_GATHER_LOGIT_ROWS = 2, /* LmiGatherRows: ids, the rows whose logits are wanted */
  LMI_NODE_RMS_NORM = 3,          /* LmiRmsNorm */
  LMI_NODE_GATED_ACTIVATION = 4,  /* LmiGatedActivation */
  LMI_NODE_ROPE_CACHE_WRITE = 5,  /* LmiRopeCacheWrite: positions, slots */
  LMI_NODE_ATTENTION = 6,         /* LmiAttention: all but q, keys, values, y and the shape */
  LMI_NODE_LINEAR = 7,            /* LmiLinearDense; few rows by linear_few_rows where it can */
  LMI_NODE_LINEAR_PACKED = 8,     /* LmiLinearPacked */
  LMI_NODE_SAMPLE = 9,            /* LmiSample: all but logits, modified, vocab_size; once, last */
  LMI_NODE_QUANTIZE_ROWS = 10,    /* LmiQuantizeRows */
  LMI_NODE_LINEAR_QUANTIZED = 11, /* LmiLinearQuantized */
  LMI_NODE_ADD_POSITIONS = 12,    /* LmiGatherRows: ids, the positions */
  LMI_NODE_NORM = 13,             /* LmiNorm */
  LMI_NODE_ACTIVATION = 14,       /* LmiActivation */
  LMI_NODE_ROUTE = 15,            /* LmiRoute */
  LMI_NODE_GROUP_ROWS = 16,       /* LmiGroupRows */
  LMI_NODE_LINEAR_EXPERTS = 17,   /* LmiLinearExperts */
  LMI_NODE_ADD_EXPERTS = 18,      /* LmiAddExperts */
  LMI_NODE_ALL_REDUCE = 19,       /* LmiAllReduce */
  LMI_NODE_GATHER_COLUMNS = 20,   /* LmiGatherColumns */
  LMI_NODE_SHARE_TOKENS = 21,     /* LmiShareTokens: token_ids, what is sampled; once */
  LMI_NODE_SQUARE_HEADS = 22,     /* LmiSquareHeads */
  LMI_NODE_SCALE_HEADS = 23,      /* LmiScaleHeads */
  LMI_NODE_HEAD_LINEAR = 24,      /* LmiHeadLinear */
  LMI_NODE_LORA_ADD = 25,         /* LmiLoraAdd: tiles, num_tiles */
};
enum { LMI_TOKEN_ROWS = 0, LMI_LOGIT_ROWS = 1, LMI_EXPERT_ROWS = 2 };
/* The arguments are copied; what they point to must outlive the list. The algorithms of dense
 * products of the most rows, and of those that decode steps are captured for, are chosen here. */
LMI_CUDA_API int32_t lmi_cuda_step_list_add(LmiStepList* list, int32_t node, int32_t rows,
                                            const void* args);

/* What `slot` of steps' adapters is from now on: LmiLoraTile::parts, or 0: nothing. By any thread,
 * while no step that was run refers to the slot. */
LMI_CUDA_API int32_t lmi_cuda_step_list_set_adapter(LmiStepList* list, int32_t slot,
                                                    uint64_t parts);
#define LMI_MAX_ADAPTERS 65536 /* slots */

/* Device memory, on 256 bytes, that the list wants for inputs, results and attention's partial
 * results. Nothing can be added once it was given. */
LMI_CUDA_API int64_t lmi_cuda_step_list_num_bytes(const LmiStepList* list);
LMI_CUDA_API int32_t lmi_cuda_step_list_start(LmiStepList* list, void* memory);

/* What logits are changed by; pointers are to host memory. Mask i is for the row whose `mask` is
 * i. */
typedef struct {
  LmiEdits biases;
  LmiEdits seen;
  LmiEdits bans;
  const uint32_t* const* masks; /* [num_masks], each of a bit per token */
  int32_t num_masks;
} LmiStepEdits;

/* What is sampled. Edits may hang on what the step before samples: edits(context), called once the
 * forward pass is on the stream, waits for them; they are copied before anything else is called. */
typedef struct {
  const LmiSampleRow* rows; /* [num_logit_rows], in host memory */
  const LmiStepEdits* (*edits)(void* context);
  void* context;
  int32_t max_top; /* log-probabilities that the results have room for */
} LmiStepSampling;

/* A step's arrays on the host, named as in csrc/graph/step.h; copied before the call returns. */
typedef struct {
  const int32_t* token_ids;
  const int32_t* positions;
  const int32_t* slots;
  const int32_t* first_rows;
  const int32_t* num_rows;
  const int32_t* kv_lengths;
  const int32_t* table_rows;
  const int32_t* block_tables; /* [any, table_stride] */
  const int32_t* logit_token_rows;
  const int32_t* copy_src;
  const int32_t* copy_dst;
  const int32_t* adapter_first_rows; /* [num_adapter_runs], as the following */
  const int32_t* adapter_num_rows;
  const int32_t* adapter_slots;
  const int32_t* followed_rows; /* [num_tokens], unless NULL: token i is what this logit row of the
                                   step before sampled, if that ran; 0 if it sampled none */
  int32_t num_tokens;
  int32_t num_seqs;
  int32_t num_logit_rows;
  int32_t num_copies;
  int32_t num_adapter_runs;
  int32_t table_stride;
  LmiStepSampling sampling;
} LmiStep;

/* Launches a step and returns; `slot` is what to wait for. On an error nothing is under way. */
LMI_CUDA_API int32_t lmi_cuda_step_list_run(LmiStepList* list, const LmiStep* step, int32_t* slot);

/* In host memory, until as many steps more as there are slots were run; as in LmiSample. No rows of
 * a list that doesn't sample. */
typedef struct {
  const int32_t* token_ids;
  const float* logprobs;
  const int32_t* num_top;
  const int32_t* target_ranks;
  const int32_t* top_ids; /* [num_rows, max_top] */
  const float* top_logprobs;
  int32_t num_rows;
  int32_t max_top;
} LmiStepResults;
LMI_CUDA_API int32_t lmi_cuda_step_list_wait(LmiStepList* list, int32_t slot,
                                             LmiStepResults* results);

/* Captures a shape that a step wanted, if there is one: while there is nothing else to do. 1 if so.
 * Of ranks each has to: a failure ends them all. */
LMI_CUDA_API int32_t lmi_cuda_step_list_capture_wanted(LmiStepList* list);
/* 1 if there is something for it to do, and room. */
LMI_CUDA_API int32_t lmi_cuda_step_list_has_wanted(const LmiStepList* list);
/* Captures a shape, given by the numbers of its counts. */
LMI_CUDA_API int32_t lmi_cuda_step_list_capture(LmiStepList* list, int32_t row_count_id,
                                                int32_t key_count_id);
/* Runs every shape once, so that the first steps needn't load or choose anything. */
LMI_CUDA_API int32_t lmi_cuda_step_list_warm_up(LmiStepList* list);

typedef struct {
  int64_t num_captured;
  int64_t num_replayed;
  const char* capture_error; /* why nothing is captured any more, or "" */
} LmiStepListState;
/* From any thread. */
LMI_CUDA_API void lmi_cuda_step_list_state(LmiStepList* list, LmiStepListState* state);

#ifdef __cplusplus
}
#endif
#endif
