// The table of CPU kernels: one per op, compiled once per instruction set, chosen at load.
//
// A kernel is a pair of functions over an argument struct. num_chunks says into how many
// independent pieces the work falls for the present counts; run does one piece, and is told the
// same num_threads so that it can find the piece's bounds again. Threads take
// chunks from an atomic counter, in any order, so a chunk must not wait for another (attention's
// spans are folded in their order, by whoever finds the next one there). Kernels allocate nothing,
// throw nothing and read no clock. Results depend on a row's own inputs only, never on the number
// of rows, chunks or threads (the rules of bitwise invariance).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "cpu/head_squares.h"
#include "cpu/instruction_set.h"
#include "cpu/packed_linear.h"
#include "cpu/slice_sums.h"
#include "graph/sampling_table.h"
#include "graph/step.h"
#include "kv/kv_layout.h"

namespace lmi::cpu {

// Per-thread memory for packing and partial results.
struct Scratch {
  uint8_t* data = nullptr;  // 64-byte aligned
  int64_t num_bytes = 0;
};
constexpr int64_t kScratchBytes = 4 << 20;

struct QuantizeRowsArgs {
  const void* x = nullptr;  // [rows, num_columns]
  DType x_dtype = DType::kBF16;
  int64_t x_stride = 0;  // elements
  int64_t num_columns = 0;
  int32_t group_size = 0;
  RowRounding rounding = RowRounding::kOutliers;
  const int32_t* input_order = nullptr;  // [num_columns] of x, as PackedLinear's
  uint8_t* y = nullptr;                  // [rows] of quantized_row_bytes()
  int64_t num_rows = 0;
};

// kGelu: by the error function; kRelu2: the square of relu; kClampedSwiglu, gated only: g / (1 +
// e^(-1.702 g)) (u + 1), where gate and up are clamped to g <= 7 and -7 <= u <= 7 (gpt-oss);
// kSoftCap: cap tanh(x / cap); kClip: x between -cap and cap.
enum class Activation : uint8_t {
  kNone,
  kSilu,
  kGeluTanh,
  kGelu,
  kRelu,
  kRelu2,
  kClampedSwiglu,
  kSoftCap,
  kClip
};

// Of some rows of the output head only the greatest output's column is wanted.
struct RowArgmax {
  const uint8_t* is_wanted = nullptr;  // [rows] 0: the row's outputs are wanted; null: all rows'
  uint64_t* candidates = nullptr;      // [rows] 0 before; raised by every chunk
};

struct LinearArgs {
  // [rows, num_inputs] in the dtype of the weight; quantised rows for a quantised weight, or
  // x_dtype if it takes none. One numeric path for all row counts.
  const void* x = nullptr;
  DType x_dtype = DType::kBF16;  // kF32 or kBF16
  int64_t x_stride = 0;          // elements; bytes of quantised rows
  PackedLinear weight;
  const float* bias = nullptr;  // [num_outputs] in the order of the unpacked matrix, or null
  // Of a gated weight, whose y has num_outputs / 2 columns, always; of others kNone, or the
  // outputs'.
  Activation activation = Activation::kNone;
  bool add_to_y = false;  // y (fp32) += result: residual in place
  void* y = nullptr;
  DType y_dtype = DType::kF32;  // kF32 or kBF16
  int64_t y_stride = 0;
  int64_t num_rows = 0;
  RowArgmax argmax;  // of linears with neither bias, activation nor residual, y in fp32
  // Of experts' outputs: the row of y for each, and what it is multiplied by before it is added.
  const int32_t* y_rows = nullptr;
  const float* row_weights = nullptr;
};

// How router logits become scores: over all experts; each on its own; or SparseMixer's (arXiv
// 2310.00811), where each of a row's experts is scored among those near the greatest logit that the
// experts before it left.
enum class ExpertScoring : uint8_t { kSoftmax, kSigmoid, kSparsemixer };

// The top_k experts of each row, ties to the lowest id, in ascending order, and their weights.
struct RouteArgs {
  const float* x = nullptr;  // [rows, num_experts] logits
  int32_t num_experts = 0;
  int32_t top_k = 0;
  ExpertScoring scoring = ExpertScoring::kSoftmax;
  const float* bias = nullptr;  // [num_experts] or null: added to scores where experts are chosen
  // Experts are chosen from the best top_groups of num_groups groups alone. A group's score is the
  // sum of its best group_best experts' scores.
  int32_t num_groups = 1;
  int32_t top_groups = 1;
  int32_t group_best = 1;
  bool normalizes = false;  // weights sum to 1
  float scale = 1.0f;       // of weights
  float threshold = 0.0f;   // of kSparsemixer: how near
  float* y = nullptr;       // [rows, 2 top_k]: ids, weights
  int64_t num_rows = 0;
};
constexpr int32_t kMaxExperts = 4096;

// A step's rows in the order of their experts, one for each that a row has.
struct ExpertRows {
  int32_t* first_rows = nullptr;  // [experts + 1] of each expert
  int32_t* active = nullptr;      // [experts] those with rows, ascending
  int32_t* num_active = nullptr;
  int32_t* token_rows = nullptr;  // ascending within an expert
  float* weights = nullptr;
};

struct GroupRowsArgs {
  const float* x = nullptr;  // [rows, 2 top_k] of route
  int32_t num_experts = 0;
  int32_t top_k = 0;
  ExpertRows experts;
  int64_t num_rows = 0;
};

// A linear whose x has the rows of ExpertRows, each multiplied by its expert's matrix. bias is
// [num_experts, num_outputs]. combines: y has the rows of tokens, to which their experts' outputs
// times weights are added in ascending order of experts.
struct GroupedLinearArgs : LinearArgs {
  ExpertRows experts;
  bool combines = false;
};

// Gated, x is what a linear without an activation gave for a gated matrix that wasn't packed as
// one.
struct ActivationArgs {
  const float* x = nullptr;  // [rows, 2 * num_columns]: gate, up; or [rows, num_columns]
  Activation activation = Activation::kSilu;
  bool gated = true;
  float cap = 0.0f;   // of kSoftCap and kClip
  void* y = nullptr;  // [rows, num_columns]; may be x if nothing is gated
  DType y_dtype = DType::kF32;
  int64_t num_columns = 0;
  int64_t num_rows = 0;
};

// What a LoRA adapter adds to one part of a fused matrix: B A x, scaled in B.
struct LoraPart {
  PackedLinear a;            // [rank, inputs]
  PackedLinear b;            // [outputs of the part, rank]
  int64_t first_output = 0;  // of the part
};

constexpr int32_t kMaxLoraParts = 3;  // query, key and value
constexpr int64_t kMaxLoraRank = 1024;

struct LoraLinear {
  LoraPart parts[kMaxLoraParts];
  int32_t num_parts = 0;  // 0: the adapter leaves this linear as it is
};

// y += B (A x) of the rows that have an adapter.
struct LoraAddArgs {
  const void* x = nullptr;     // what the linear itself reads, before any quantisation
  DType dtype = DType::kBF16;  // of x, A and B
  int64_t x_stride = 0;
  float* y = nullptr;  // what the linear wrote, or added to
  int64_t y_stride = 0;
  const LoraLinear* const* slots = nullptr;  // of each adapter slot, by linear id
  int32_t linear_id = 0;
  const StepView* step = nullptr;
};

// kNone: y is x, converted.
enum class NormKind : uint8_t { kNone, kRms, kLayer };

// y = (x - shift) * scale * weight + bias, where shift is the mean (kLayer; else 0) and scale the
// inverse root of the mean square of what is left. A row is num_groups such vectors side by side.
struct NormArgs {
  const float* x = nullptr;  // [rows] of groups, from first_column on
  int64_t x_stride = 0;
  int64_t first_column = 0;
  NormKind kind = NormKind::kRms;
  const float* weight = nullptr;  // [num_groups * num_columns] or null: ones
  const float* bias = nullptr;    // the same, or null: zeros
  float eps = 0.0f;
  void* y = nullptr;            // as x, in place, if there are groups or first_column
  DType y_dtype = DType::kF32;  // kF32, kBF16, or kI8: quantised rows
  bool add_to_y = false;        // y (fp32) += result
  int64_t num_columns = 0;      // of a group
  int64_t num_groups = 1;
  int64_t num_rows = 0;
  int32_t group_size = 0;  // of quantised rows
  RowRounding rounding = RowRounding::kOutliers;
  const int32_t* input_order = nullptr;  // of quantised rows, as PackedLinear's
};

struct EmbedArgs {
  const int32_t* ids = nullptr;  // of tokens, or positions
  int32_t offset = 0;            // added to ids
  const void* table = nullptr;   // [vocab, num_columns], of blocks as GGUF has them
  DType table_dtype = DType::kBF16;
  float scale = 1.0f;
  bool add_to_y = false;
  float* y = nullptr;
  int64_t num_columns = 0;
  int64_t num_rows = 0;
};

struct GatherRowsArgs {
  const float* x = nullptr;
  const int32_t* rows = nullptr;
  float* y = nullptr;
  int64_t num_columns = 0;
  int64_t num_rows = 0;
};

// Row i of x becomes row rows[i] of y.
struct ScatterRowsArgs {
  const void* x = nullptr;
  const int32_t* rows = nullptr;
  uint8_t* y = nullptr;
  int64_t row_bytes = 0;
  int64_t num_rows = 0;
};

// Column i of x becomes column columns[i] of y, whose other columns are kAbsentLogit.
constexpr float kAbsentLogit = -1e30f;  // finite, but as unlikely as what is banned
struct SpreadColumnsArgs {
  const float* x = nullptr;
  int64_t x_stride = 0;
  const int32_t* columns = nullptr;  // [x_stride]
  float* y = nullptr;
  int64_t num_columns = 0;
  int64_t num_rows = 0;
};

// Each head's columns times its own matrix of weight.num_experts: y, of all heads, has no bias,
// activation or residual.
struct HeadLinearArgs : LinearArgs {};

// Normalise (optional, per head), rotate, write K and V to the cache, q to its own buffer.
struct RopeCacheArgs {
  const float* qkv = nullptr;  // [T, (hq + 2 hkv) * d]: q heads, k heads, v heads
  // [T, d] or null: the one k head, of a latent cache; qkv has q heads alone then.
  const float* latent = nullptr;
  int32_t num_q_heads = 0;
  KvCacheView cache;
  int32_t layer = 0;
  const float* cos = nullptr;  // [positions, rotary / 2]
  const float* sin = nullptr;
  int32_t rotary_dim = 0;
  const float* q_norm = nullptr;  // [d] or null
  const float* k_norm = nullptr;
  float norm_eps = 0.0f;
  void* q = nullptr;  // [T, hq * d]
  DType q_dtype = DType::kF32;
  const StepView* step = nullptr;
};

// Attention over the paged cache, causal unless sees_later. KV partitions are 256 tokens at
// absolute positions, each reduced on its own and merged in position order, the same for prefill
// and decode.
constexpr int32_t kAttentionPartition = 256;

// The workspace starts with a mark of each span of partitions that is handed out separately: fewer
// than twice as many as chunks are wanted.
constexpr int64_t kMaxSplitTiles = 256;
constexpr int64_t kAttentionMarkBytes = 2 * kMaxSplitTiles * 4;

struct AttentionArgs {
  const void* q = nullptr;  // [T, hq * d], rotated
  DType q_dtype = DType::kF32;
  int32_t num_q_heads = 0;
  KvCacheView cache;
  int32_t layer = 0;
  float scale = 1.0f;
  int32_t window = 0;     // keys seen, the query's own included; 0: all
  float soft_cap = 0.0f;  // 0: off; else scores = cap * tanh(scores / cap)
  // [hq] or null: what is added to a head's scores per position, which is -1 for the key right
  // before the query (ALiBi, arXiv 2108.12409).
  const float* slopes = nullptr;
  // A token sees all of its sequence, whose tokens are all in the step; window: keys nearer than
  // this on either side.
  bool sees_later = false;
  // [hq, 2 * relative_span] or null: what is added to a head's score of a key, by the key's
  // position less the query's plus relative_span. A lane's width more than the longest distance.
  const float* relative = nullptr;
  int32_t relative_span = 0;
  const float* sinks = nullptr;  // [hq] or null: a further score of each head, of no value
  void* y = nullptr;             // [T, hq * d]
  DType y_dtype = DType::kF32;
  const StepView* step = nullptr;
  uint8_t* workspace = nullptr;  // shared, attention_workspace_bytes(), zero before the first step
};

// The sample kernel keeps a row's copy and its candidates in the scratch memory.
constexpr int64_t kMaxVocabSize = 320 * 1024;

struct SampleArgs {
  const float* logits = nullptr;  // [L, vocab]
  int64_t logits_stride = 0;
  int64_t vocab_size = 0;  // at most kMaxVocabSize
  const StepView* step = nullptr;
  RowArgmax argmax;  // rows whose token is known
};

struct BlockCopyArgs {
  KvCacheView cache;
  const StepView* step = nullptr;
};

template <typename Args>
struct Kernel {
  int64_t (*num_chunks)(const Args& args, int32_t num_threads) = nullptr;
  void (*run)(const Args& args, int64_t chunk, int32_t num_threads, Scratch& scratch) = nullptr;
};

// The machine's limits for benches: what a loop of nothing else reaches on one thread.
struct Roofs {
  // Independent multiply-adds from registers; returns the operations done.
  double (*multiply_add_f32)(int64_t num_steps) = nullptr;
  double (*multiply_add_bf16)(int64_t num_steps) = nullptr;
  double (*multiply_add_int8)(int64_t num_steps) = nullptr;
  void (*read_memory)(const void* source, int64_t num_bytes) = nullptr;
};

// Symmetric quantisation of weights that share a scale: codes lowest .. highest. Buffers hold a
// multiple of 16, zeros beyond the weights. The same bits at every level.
struct WeightQuantizer {
  // The scale of least squared error among those that a search tries; 0 if all weights are (next
  // to) zero, NaN if one isn't finite.
  float (*find_scale)(const float* weights, int64_t count, int32_t lowest,
                      int32_t highest) = nullptr;
  // Nearest code + offset of every weight.
  void (*encode)(const float* weights, int64_t count, float scale, int32_t lowest, int32_t highest,
                 int32_t offset, uint8_t* codes) = nullptr;
};

// Every op's kernel, and the arguments that it takes. An .inc of isa/ defines <op>_kernel.
#define LMI_KERNELS(KERNEL)                   \
  KERNEL(embed, EmbedArgs)                    \
  KERNEL(norm, NormArgs)                      \
  KERNEL(quantize_rows, QuantizeRowsArgs)     \
  KERNEL(quantize_slices, QuantizeSlicesArgs) \
  KERNEL(linear, LinearArgs)                  \
  KERNEL(summed_linear, SummedLinearArgs)     \
  KERNEL(activation, ActivationArgs)          \
  KERNEL(lora_add, LoraAddArgs)               \
  KERNEL(route, RouteArgs)                    \
  KERNEL(group_rows, GroupRowsArgs)           \
  KERNEL(grouped_linear, GroupedLinearArgs)   \
  KERNEL(head_linear, HeadLinearArgs)         \
  KERNEL(rope_cache_write, RopeCacheArgs)     \
  KERNEL(attention, AttentionArgs)            \
  KERNEL(gather_rows, GatherRowsArgs)         \
  KERNEL(scatter_rows, ScatterRowsArgs)       \
  KERNEL(spread_columns, SpreadColumnsArgs)   \
  KERNEL(sum, SumArgs)                        \
  KERNEL(head_squares, HeadSquaresArgs)       \
  KERNEL(norm_by_squares, NormBySquaresArgs)  \
  KERNEL(sample, SampleArgs)                  \
  KERNEL(block_copy, BlockCopyArgs)

struct Kernels {
  InstructionSet instruction_set = InstructionSet::kScalar;
#define LMI_KERNEL_FIELD(op, Args) Kernel<Args> op;
  LMI_KERNELS(LMI_KERNEL_FIELD)
#undef LMI_KERNEL_FIELD
  WeightQuantizer weight_quantizer;
  BlockPacking block_packing;
  Roofs roofs;
};

// Bytes of shared workspace that attention needs for these capacities.
int64_t attention_workspace_bytes(const StepCapacity& capacity, int32_t num_q_heads,
                                  const KvCacheView& cache);

const Kernels& kernels(InstructionSet level);

}  // namespace lmi::cpu
