// The table of CPU kernels: one per op, compiled once per instruction set, chosen at load.
//
// A kernel is a pair of functions over an argument struct. num_chunks says into how many
// independent pieces the work falls for the present counts; run does one piece, and is told the
// same num_threads so that it can find the piece's bounds again. Threads take
// chunks from an atomic counter, in any order, so a chunk must not depend on another (where one
// does, e.g. merging attention partitions, the last one to arrive does the joint work in a fixed
// order). Kernels allocate nothing, throw nothing and read no clock. Results depend on a row's own
// inputs only, never on the number of rows, chunks or threads (the rules of bitwise invariance).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "cpu/block_format.h"
#include "graph/sampling_table.h"
#include "graph/step.h"
#include "kv/kv_layout.h"

namespace lmi::cpu {

enum class InstructionSet : uint8_t { kScalar, kAvx2, kAvx512, kAvx512Bf16 };

// Per-thread memory for packing and partial results.
struct Scratch {
  uint8_t* data = nullptr;  // 64-byte aligned
  int64_t num_bytes = 0;
};
constexpr int64_t kScratchBytes = 4 << 20;

// A weight matrix [num_outputs, num_inputs] in the kernel's own order. Panels of 16 outputs:
//   fp32: [inputs][16]
//   bf16: [inputs/2][16][2]
//   int8: 16 fp32 scales, then [inputs/4][16][4] codes c of a byte: weight = scale (c - 128),
//         one scale per output; quantising gives c in 1 .. 255, checkpoints may hold 0
//   int4: per group of 32, 64 or 128 inputs: 16 fp16 scales, 16 fp16 zero points, then
//         [group/8][16][4] bytes, whose lower halves are the codes c of inputs 0 .. 3 and whose
//         upper halves those of inputs 4 .. 7: weight = scale (c - zero), c in 0 .. 15. Symmetric
//         weights have the zero point 8; others any that fp16 holds.
//   fp16: [inputs][16]
//   GGUF's types of blocks: their bytes in the order of block_format.h
// So every step along K of the first four is 64 bytes. Outputs are padded with zeros to a multiple
// of 16, inputs to a whole step, of int4 to a whole group. A gated weight holds gate and up panels
// alternating (gate 0, up 0, gate 1, up 1, ...), num_outputs counting both; each of the two is
// padded on its own. Packed weights are kept on disk: whoever changes this order, or what
// quantising gives, counts kPackedLayoutVersion up.
constexpr int64_t kPanelOutputs = 16;
constexpr int32_t kPackedLayoutVersion = 1;
constexpr int64_t kMaxInt8Inputs = 65536;  // so that 32 bits hold every sum of products

// How the inputs of int8 and int4 weights are rounded, each row on its own.
enum class RowRounding : uint8_t {
  kInt8,      // to 255 steps of one scale
  kOutliers,  // the same, but a row's few largest inputs to 16 bits of that scale
  kNone,      // not at all: products are those of the unpacked weight in fp32
};

struct LinearFormat {
  DType dtype = DType::kBF16;
  int32_t group_size = 0;  // int4: inputs per scale; blocks: kBlockSumInputs; others 0
  RowRounding rounding = RowRounding::kOutliers;  // changes nothing of what is packed
};

struct PackedLinear {
  DType dtype = DType::kBF16;
  int64_t num_outputs = 0;
  int64_t num_inputs = 0;
  bool gated = false;
  const void* data = nullptr;  // 64-byte aligned; memory belongs to LinearWeight
  int32_t group_size = 0;
  RowRounding rounding = RowRounding::kOutliers;  // of what a quantised weight is multiplied with

  // Not of the activations' own type, which only fp32 and bf16 are.
  bool is_quantized() const { return dtype != DType::kF32 && dtype != DType::kBF16; }
  bool takes_quantized_rows() const {
    return is_quantized() && dtype != DType::kF16 && rounding != RowRounding::kNone;
  }
  // Quantised rows for the other weight are right for this one.
  bool takes_rows_of(const PackedLinear& other) const {
    return takes_quantized_rows() && other.takes_quantized_rows() && rounding == other.rounding &&
           group_size == other.group_size;
  }
};

// A row of inputs for int8 and int4 weights: x = scale q, where q has 8 bits, or of outliers 16:
// q = low + 256 high, both of int8. A row's scale is the largest magnitude over 127, without
// outliers. With them, t is the least of largest / 8, largest / 16, .. largest / 512 that at most
// max_outliers() magnitudes reach, if there is one, and the scale the largest magnitude below 2 t,
// or largest / 256 if that is more, over 127: so a row has no more outliers than it takes to come
// within a factor of 2 of the finest scale. Nothing but maxima and counts decides, which no order
// changes, and sums of products are whole numbers: so every device and shape finds the same bits.
//   int8 low[inputs, padded with zeros to a multiple of 128]
//   float scale; NaN if an input isn't finite
//   int32 number of inputs whose high isn't 0
//   int32 sums of low: over each group of an int4 weight, or one over the row
//   int32 column << 8 | high as a byte, of each input whose high isn't 0, columns ascending
// padded to a multiple of 64 bytes. The sums take the codes' offsets out again: sum (c - z) q =
// sum c q - z sum q, where c is unsigned and q signed as the instructions want them.
constexpr int64_t max_outliers(int64_t num_inputs) { return num_inputs / 32; }
constexpr int64_t quantized_scale_offset(int64_t num_inputs) {
  return (num_inputs + 127) / 128 * 128;
}
constexpr int64_t quantized_sums_offset(int64_t num_inputs) {
  return quantized_scale_offset(num_inputs) + 8;
}
constexpr int64_t outliers_offset(int64_t num_inputs, int32_t group_size) {
  const int64_t num_sums = group_size == 0 ? 1 : (num_inputs + group_size - 1) / group_size;
  return quantized_sums_offset(num_inputs) + 4 * num_sums;
}
constexpr int64_t quantized_row_bytes(int64_t num_inputs, int32_t group_size) {
  return (outliers_offset(num_inputs, group_size) + 4 * max_outliers(num_inputs) + 63) / 64 * 64;
}

struct QuantizeRowsArgs {
  const void* x = nullptr;  // [rows, num_columns]
  DType x_dtype = DType::kBF16;
  int64_t x_stride = 0;  // elements
  int64_t num_columns = 0;
  int32_t group_size = 0;
  RowRounding rounding = RowRounding::kOutliers;
  uint8_t* y = nullptr;  // [rows] of quantized_row_bytes()
  int64_t num_rows = 0;
};

// kGelu: by the error function; kRelu2: the square of relu; kSoftCap: cap tanh(x / cap).
enum class Activation : uint8_t { kNone, kSilu, kGeluTanh, kGelu, kRelu, kRelu2, kSoftCap };

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
};

// Gated, x is what a linear without an activation gave for a gated matrix that wasn't packed as
// one.
struct ActivationArgs {
  const float* x = nullptr;  // [rows, 2 * num_columns]: gate, up; or [rows, num_columns]
  Activation activation = Activation::kSilu;
  bool gated = true;
  float cap = 0.0f;   // of kSoftCap
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

// Normalise (optional, per head), rotate, write K and V to the cache, q to its own buffer.
struct RopeCacheArgs {
  const float* qkv = nullptr;  // [T, (hq + 2 hkv) * d]: q heads, k heads, v heads
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

// Causal attention over the paged cache. KV partitions are 256 tokens at absolute positions, each
// reduced on its own and merged in position order, the same for prefill and decode.
constexpr int32_t kAttentionPartition = 256;

// The workspace starts with a counter for each tile whose partitions are handed out separately.
constexpr int64_t kMaxSplitTiles = 256;
constexpr int64_t kAttentionCounterBytes = kMaxSplitTiles * 4;

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
  void* y = nullptr;  // [T, hq * d]
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

struct Kernels {
  InstructionSet instruction_set = InstructionSet::kScalar;
  Kernel<EmbedArgs> embed;
  Kernel<NormArgs> norm;
  Kernel<QuantizeRowsArgs> quantize_rows;
  Kernel<LinearArgs> linear;
  Kernel<ActivationArgs> activation;
  Kernel<LoraAddArgs> lora_add;
  Kernel<RopeCacheArgs> rope_cache_write;
  Kernel<AttentionArgs> attention;
  Kernel<GatherRowsArgs> gather_rows;
  Kernel<SampleArgs> sample;
  Kernel<BlockCopyArgs> block_copy;
  WeightQuantizer weight_quantizer;
  BlockPacking block_packing;
  Roofs roofs;
};

// Bytes of shared workspace that attention needs for these capacities.
int64_t attention_workspace_bytes(const StepCapacity& capacity, int32_t num_q_heads,
                                  const KvCacheView& cache);

// One source of a packed matrix: row-major [num_outputs, num_inputs] in dtype fp32, bf16, fp16 or
// e4m3, whose elements are multiples of scales [num_outputs, num_scales]: one for a row, or one for
// every kScaleInputs. Or in the packed format itself, int8 or int4: bytes, each a code, which are
// kept, with scales and, of int4, zero points [num_outputs, num_scales] for each of its groups; or
// GGUF's blocks, whose type is the packed format, too.
struct LinearPart {
  const void* data = nullptr;
  DType dtype = DType::kBF16;
  int64_t num_outputs = 0;
  const float* scales = nullptr;
  int64_t num_scales = 0;
  const float* zeros = nullptr;

  bool is_coded() const { return dtype == DType::kI8 || dtype == DType::kI4; }
  int64_t row_bytes(int64_t num_inputs) const {
    const BlockFormat blocks = block_format(dtype);
    if (blocks.num_inputs != 0) return num_inputs / blocks.num_inputs * blocks.num_bytes;
    return num_inputs * (is_coded() ? 1 : dtype_size(dtype));
  }
};
constexpr int64_t kScaleInputs = 128;

// Panels and bytes of the packed form, and the packing itself of panels [first_panel, end_panel),
// so that callers can split it over threads. target is 64-byte aligned memory of that many bytes;
// padding is written too. A gated matrix has two parts, gate and up, of equal num_outputs. int8 and
// int4 are quantised on the way, unless they are the parts' own format.
int64_t num_linear_panels(int64_t num_outputs, bool gated);
int64_t packed_linear_bytes(LinearFormat format, int64_t num_outputs, int64_t num_inputs,
                            bool gated);
void check_linear_format(LinearFormat format, int64_t num_inputs);  // throws Error
const char* row_rounding_name(RowRounding rounding);                // "int8", "outliers" or "none"
RowRounding parse_row_rounding(const std::string& name);            // throws Error
void pack_linear(const std::vector<LinearPart>& parts, int64_t num_inputs, bool gated,
                 LinearFormat format, void* target, int64_t first_panel, int64_t end_panel);
// The row-major float matrix back (tests).
void unpack_linear(const PackedLinear& weight, float* target);

// Levels compiled into this build that this CPU can run, worst first.
std::vector<InstructionSet> available_instruction_sets();
// "scalar", "avx2", "avx512" or "avx512_bf16".
const char* instruction_set_name(InstructionSet level);
// The best level, or the one the environment variable LMI_INSTRUCTION_SET names.
InstructionSet default_instruction_set();
InstructionSet parse_instruction_set(const std::string& name);  // throws Error with what is allowed
const Kernels& kernels(InstructionSet level);

}  // namespace lmi::cpu
