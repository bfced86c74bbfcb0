/* Mixtures of experts, a part of lmi_cuda.h, which includes it; products: lmi_products.h. */
#ifndef LMI_EXPERTS_H_
#define LMI_EXPERTS_H_

enum { LMI_SOFTMAX = 0, LMI_SIGMOID = 1, LMI_SPARSEMIXER = 2 };

/* Which experts a row takes, by the rules of ops.route (lmi_core/ops/experts.py): ids ascending,
 * then their weights. No NaN is greater than another number; of equals the lowest id is first. */
typedef struct {
  const float* logits; /* [num_rows, num_experts] */
  const float* bias;   /* [num_experts], of the choice alone; NULL: none */
  float* y;            /* [num_rows, 2 top_k] */
  int32_t num_rows;
  int32_t num_experts; /* at most LMI_MAX_EXPERTS */
  int32_t top_k;       /* at most num_experts */
  int32_t scoring;
  int32_t num_groups; /* of as many experts each; at most LMI_MAX_EXPERT_GROUPS */
  int32_t top_groups; /* whose experts may be chosen */
  int32_t group_best; /* 1 or 2: best experts that a group is judged by */
  int32_t normalizes;
  float scale;
  float threshold;
} LmiRoute;
#define LMI_MAX_EXPERTS 512
#define LMI_MAX_EXPERT_GROUPS 32
LMI_CUDA_API int32_t lmi_cuda_route(const LmiRoute* args, void* stream);

/* A step's rows by ascending expert, then token, of what `route` gives. */
typedef struct {
  const float* routes; /* [num_rows, 2 top_k] */
  int32_t* token_rows; /* [num_rows top_k]: the token of each */
  int32_t* places;     /* [num_rows, top_k]: the row of each of a token's experts */
  int32_t* first_rows; /* [num_experts + 1]: of each expert */
  int32_t num_rows;    /* tokens */
  int32_t num_experts;
  int32_t top_k;
} LmiGroupRows;
LMI_CUDA_API int32_t lmi_cuda_group_rows(const LmiGroupRows* args, void* stream);

/* sums = y times their weights in `routes`, of each token in ascending order of experts, + sums if
   adds. */
typedef struct {
  const float* y;        /* [num_rows top_k, num_columns] */
  const float* routes;   /* [num_rows, 2 top_k] */
  const int32_t* places; /* of group_rows; NULL: y has a token's experts one after the other */
  float* sums;           /* [num_rows, num_columns] */
  int32_t num_rows;      /* tokens */
  int32_t num_columns;
  int32_t top_k;
  int32_t adds; /* 1, or 0: sums start from 0 */
} LmiAddExperts;
LMI_CUDA_API int32_t lmi_cuda_add_experts(const LmiAddExperts* args, void* stream);

#endif
