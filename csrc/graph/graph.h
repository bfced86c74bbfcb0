// The step graph: a recorded list of kernel calls, replayed for every step.
//
// Recording happens once per model: each call appends a node whose operands are values (name,
// dtype, columns, row symbol; no data). finish() gives every value an arena offset from its
// lifetime. Replaying reads all counts from the step buffer, so one recording serves every batch. A
// step is one parallel region and a node one of its phases, whose chunks threads take from an
// atomic counter.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "common/aligned_memory.h"
#include "common/mapped_file.h"
#include "common/thread_pool.h"
#include "cpu/kernels.h"
#include "graph/lora_table.h"
#include "graph/step.h"
#include "graph/value.h"

namespace lmi {

class RankGroup;

struct GraphConfig {
  StepCapacity capacity;
  DType act_dtype = DType::kBF16;  // kF32 or kBF16: inputs of linear and attention
  cpu::InstructionSet instruction_set = cpu::InstructionSet::kScalar;
};

// What a node took, summed over steps.
struct NodeTime {
  int64_t num_steps = 0;
  int64_t wall_ns = 0;  // until the next node began
  int64_t num_chunks = 0;
  std::atomic<int64_t> cpu_ns{0};  // of all threads in its chunks
};

class Graph {
 public:
  explicit Graph(const GraphConfig& config);
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  // The nodes read this file; from when it has lost what they read, every step fails.
  void watch(std::shared_ptr<const MappedFile> file);

  // Before anything is recorded: the model is computed by these ranks, of which this graph is one,
  // and replayed by all of them or none. The caller keeps the group.
  void join(RankGroup& group);

  // Recording. A linear with a quantised weight quantises its input, in a node of its own unless
  // the input comes quantised: a norm whose result nothing reads but linears with weights like
  // `reader` gives it so. Arguments carry the constant operands (weights, sizes, flags); pointers
  // to activations, row counts and the step are filled in at run time. Owners of constant memory
  // are kept by the caller for as long as the graph lives.
  ValueId embed(cpu::EmbedArgs args);
  // In place: rows of a table by position, or by token type.
  ValueId add_positions(ValueId x, cpu::EmbedArgs args);
  ValueId add_token_types(ValueId x, cpu::EmbedArgs args);
  ValueId norm(ValueId x, cpu::NormArgs args, const cpu::PackedLinear* reader = nullptr);
  ValueId norm_add(ValueId x, ValueId residual, cpu::NormArgs args);  // in place
  ValueId norm_heads(ValueId x, cpu::NormArgs args);  // in place: groups from first_column on
  ValueId linear(ValueId x, cpu::LinearArgs args);
  // As one linear, whose weight's parts are packed each in its own format.
  ValueId linear(ValueId x, const std::vector<cpu::LinearArgs>& parts);
  ValueId linear_add(ValueId x, ValueId residual, cpu::LinearArgs args);  // in place
  ValueId activation(ValueId x, cpu::Activation activation, bool gated);
  // In place, by kSoftCap or kClip.
  ValueId bounded(ValueId x, cpu::Activation kind, float cap);
  // In place: y is what linear_id gave for x, or what it was added to. The caller keeps the table.
  // first_input: of x's columns, that it reads.
  ValueId lora_add(ValueId x, ValueId y, const LoraTable& table, int32_t linear_id,
                   int64_t first_input = 0);
  // A mixture's experts of each row of logits; grouped linears take the last one's. Rows of x are
  // tokens', or those that a grouped linear gave. The caller keeps args' bias.
  ValueId route(ValueId logits, cpu::RouteArgs args);
  ValueId grouped_linear(ValueId x, ValueId routes, cpu::LinearArgs args);
  ValueId grouped_linear_add(ValueId x, ValueId routes, ValueId residual,
                             cpu::LinearArgs args);  // in place
  ValueId head_linear(ValueId x, cpu::LinearArgs args);
  // latent: -1, or the one key and value head, without which qkv is.
  ValueId rope_cache_write(ValueId qkv, cpu::RopeCacheArgs args, ValueId latent = -1);
  ValueId attention(ValueId q, cpu::AttentionArgs args);
  ValueId gather_logit_rows(ValueId x);
  // Sums over slices of the inputs, of which this graph has some: of x's columns, each slice's
  // times its own matrix, and then over the slices and ranks in their order, to which bias and, in
  // place, the residual are added. A product rounds a slice's inputs by that slice alone. What
  // adapters add to a slice's product is told by an id of its own for each; no table: nothing.
  ValueId summed_linear(ValueId x, std::vector<cpu::LinearArgs> slices, const float* bias,
                        ValueId residual = -1, const LoraTable* table = nullptr,
                        const std::vector<int32_t>& linear_ids = {});
  // The same of experts' outputs, weighted by routes; slices have their own biases.
  ValueId summed_experts(ValueId x, ValueId routes, const std::vector<cpu::LinearArgs>& slices,
                         ValueId residual);
  // In place, of the columns of qkv that are q's and then k's: all heads of the model's queries
  // normed together, of which this rank has some, and those of its keys, of which num_alike ranks
  // have the same. The caller keeps the weights. Bits don't depend on the number of ranks.
  ValueId norm_all_heads(ValueId qkv, const float* q_weight, const float* k_weight, float eps,
                         int64_t head_dim, int64_t num_q, int64_t num_k, int32_t num_alike);
  // Some columns of the logits, of which other ranks have the others; rank 0 has all of them when
  // it comes back from meet().
  ValueId gathered_linear(ValueId x, const std::vector<cpu::LinearArgs>& parts,
                          int64_t first_column);
  void meet(ValueId x);  // last, but for what rank 0 does with x
  // Rows of a table by slot, of x's dtype and columns. keep_rows writes them: those of token rows
  // in their slots, with those of blocks that the step copies; those of logit rows in the slots of
  // the positions behind theirs, which are in no step before this one. The caller keeps the table.
  ValueId kept_rows(cpu::EmbedArgs args);
  void keep_rows(ValueId x, uint8_t* table);
  // Columns of the result that x's are, ascending; the caller keeps them.
  ValueId spread_columns(ValueId x, const int32_t* columns, int64_t num_columns);
  void sample(ValueId logits);
  void output(ValueId x);  // keeps x readable after the step
  void finish();

  const Value& value(ValueId id) const;
  const GraphConfig& config() const { return config_; }
  int64_t arena_bytes() const { return arena_.num_bytes(); }
  const uint8_t* data(ValueId id) const;
  std::vector<std::string> describe() const;

  // Measures each node of the following steps of num_tokens tokens; 0: of none. A clock is read
  // around every chunk, so a measured step is a little slower. as_threads: their nodes are cut into
  // chunks as for so many threads; 0: as for the pool's. Not while a step runs.
  void measure_nodes(int32_t num_tokens, int32_t as_threads = 0);
  const std::vector<NodeTime>& node_times() const { return node_times_; }

  // Replays every node on all threads of the pool; called by one thread at a time.
  void run(const StepView& step, ThreadPool& pool, std::vector<cpu::Scratch>& scratch);

 private:
  // A node's kernel, its arguments and the values that those of the same names point to.
  struct EmbedNode {
    static constexpr const char* kName = "embed";
    static constexpr auto kKernel = &cpu::Kernels::embed;
    cpu::EmbedArgs args;
    ValueId y;
    int32_t* StepView::* ids = &StepView::token_ids;
  };
  struct NormNode {
    static constexpr const char* kName = "norm";
    static constexpr auto kKernel = &cpu::Kernels::norm;
    cpu::NormArgs args;
    ValueId x, y;
  };
  // Columns of a value, from one on.
  struct SliceInput {
    ValueId id;
    int64_t first_input;
  };
  struct QuantizeNode {
    static constexpr const char* kName = "quantize_rows";
    static constexpr auto kKernel = &cpu::Kernels::quantize_rows;
    cpu::QuantizeRowsArgs args;
    ValueId x, y;
  };
  // Of those slices of x whose products take quantised rows, each into rows of its own.
  struct QuantizeSlicesNode {
    static constexpr const char* kName = "quantize_slices";
    static constexpr auto kKernel = &cpu::Kernels::quantize_slices;
    cpu::QuantizeSlicesArgs args;
    ValueId x;
    std::vector<cpu::QuantizeRowsArgs> slices;
    std::vector<SliceInput> inputs;
    std::vector<ValueId> ys;
  };
  struct LinearNode {
    static constexpr const char* kName = "linear";
    static constexpr auto kKernel = &cpu::Kernels::linear;
    cpu::LinearArgs args;
    ValueId x, y;
    int64_t first_column = 0;  // of y, that are its outputs
    bool feeds_sample = false;
    int64_t first_input = 0;  // of x, from which on its inputs are
  };
  struct ActivationNode {
    static constexpr const char* kName = "activation";
    static constexpr auto kKernel = &cpu::Kernels::activation;
    cpu::ActivationArgs args;
    ValueId x, y;
  };
  struct LoraAddNode {
    static constexpr const char* kName = "lora_add";
    static constexpr auto kKernel = &cpu::Kernels::lora_add;
    cpu::LoraAddArgs args;
    ValueId x, y;
    int64_t first_input = 0;
  };
  struct RouteNode {
    static constexpr const char* kName = "route";
    static constexpr auto kKernel = &cpu::Kernels::route;
    cpu::RouteArgs args;
    ValueId x, y;
  };
  struct GroupRowsNode {
    static constexpr const char* kName = "group_rows";
    static constexpr auto kKernel = &cpu::Kernels::group_rows;
    cpu::GroupRowsArgs args;
    ValueId x;
  };
  struct GroupedLinearNode {
    static constexpr const char* kName = "grouped_linear";
    static constexpr auto kKernel = &cpu::Kernels::grouped_linear;
    cpu::GroupedLinearArgs args;
    ValueId x, y;
    int64_t first_input = 0;
  };
  struct HeadLinearNode {
    static constexpr const char* kName = "head_linear";
    static constexpr auto kKernel = &cpu::Kernels::head_linear;
    cpu::HeadLinearArgs args;
    ValueId x, y;
  };
  struct RopeCacheNode {
    static constexpr const char* kName = "rope_cache_write";
    static constexpr auto kKernel = &cpu::Kernels::rope_cache_write;
    cpu::RopeCacheArgs args;
    ValueId qkv, q;
    ValueId latent = -1;
  };
  struct AttentionNode {
    static constexpr const char* kName = "attention";
    static constexpr auto kKernel = &cpu::Kernels::attention;
    cpu::AttentionArgs args;
    ValueId q, y;
  };
  struct GatherNode {
    static constexpr const char* kName = "gather_rows";
    static constexpr auto kKernel = &cpu::Kernels::gather_rows;
    cpu::GatherRowsArgs args;
    ValueId x, y;
  };
  struct KeepRowsNode {
    static constexpr const char* kName = "keep_rows";
    static constexpr auto kKernel = &cpu::Kernels::scatter_rows;
    cpu::ScatterRowsArgs args;
    ValueId x;
  };
  struct SpreadColumnsNode {
    static constexpr const char* kName = "spread_columns";
    static constexpr auto kKernel = &cpu::Kernels::spread_columns;
    cpu::SpreadColumnsArgs args;
    ValueId x, y;
  };
  struct SumNode {
    static constexpr const char* kName = "sum";
    static constexpr auto kKernel = &cpu::Kernels::sum;
    cpu::SumArgs args;
    ValueId y;
    std::vector<ValueId> parts;
  };
  struct SummedLinearNode {
    static constexpr const char* kName = "summed_linear";
    static constexpr auto kKernel = &cpu::Kernels::summed_linear;
    cpu::SummedLinearArgs args;
    ValueId x, y;
    std::vector<cpu::LinearArgs> slices;
    std::vector<SliceInput> inputs;
    std::vector<ValueId> parts;
  };
  // Of what all ranks have in the memory of a turn, once they have met.
  struct AllReduceNode {
    static constexpr const char* kName = "all_reduce";
    static constexpr auto kKernel = &cpu::Kernels::sum;
    cpu::SumArgs args;
    ValueId y;
    int32_t turn;
  };
  struct HeadSquaresNode {
    static constexpr const char* kName = "head_squares";
    static constexpr auto kKernel = &cpu::Kernels::head_squares;
    cpu::HeadSquaresArgs args;
    ValueId x, y;
  };
  // By the squares of these ranks, or of this graph alone.
  struct NormBySquaresNode {
    static constexpr const char* kName = "norm_by_squares";
    static constexpr auto kKernel = &cpu::Kernels::norm_by_squares;
    cpu::NormBySquaresArgs args;
    ValueId squares, y;
    int64_t first_square = 0;  // of each rank's
    std::vector<int32_t> ranks;
    bool meets = false;
  };
  struct MeetNode {
    static constexpr const char* kName = "meet";
    static constexpr auto kKernel = &cpu::Kernels::sum;
    cpu::SumArgs args;  // of no rows
  };
  struct SampleNode {
    static constexpr const char* kName = "sample";
    static constexpr auto kKernel = &cpu::Kernels::sample;
    cpu::SampleArgs args;
    ValueId logits;
    bool follows_linear = false;
  };
  struct BlockCopyNode {
    static constexpr const char* kName = "block_copy";
    static constexpr auto kKernel = &cpu::Kernels::block_copy;
    cpu::BlockCopyArgs args;
  };
  using Node =
      std::variant<EmbedNode, NormNode, QuantizeNode, LinearNode, RopeCacheNode, AttentionNode,
                   GatherNode, SampleNode, BlockCopyNode, ActivationNode, LoraAddNode, RouteNode,
                   GroupRowsNode, GroupedLinearNode, HeadLinearNode, SumNode, AllReduceNode,
                   QuantizeSlicesNode, SummedLinearNode, MeetNode, KeepRowsNode, SpreadColumnsNode,
                   HeadSquaresNode, NormBySquaresNode>;

  ValueId add_rows(ValueId x, cpu::EmbedArgs args, int32_t* StepView::* ids);
  void bind_kept(KeepRowsNode& node, const StepView& step) const;
  ValueId add_value(std::string name, DType dtype, int64_t columns, RowSymbol rows);
  void add_node(Node node, std::initializer_list<ValueId> operands);
  void check_recording() const;
  void check_operand(ValueId id, DType dtype, int64_t columns, const char* what) const;
  ValueId linear_input(ValueId x, const cpu::PackedLinear& weight);
  ValueId quantized_value(ValueId x, const cpu::PackedLinear& weight);
  cpu::QuantizeRowsArgs quantize_args(ValueId x, const cpu::PackedLinear& weight) const;
  std::vector<SliceInput> slice_inputs(ValueId x, const std::vector<cpu::LinearArgs>& slices);
  ValueId add_slices(ValueId x, std::vector<cpu::LinearArgs> slices, std::vector<SliceInput> inputs,
                     const float* bias, ValueId residual);
  ValueId partial_value(RowSymbol rows, int64_t columns, bool is_first);
  void add_norm_by_squares(NormBySquaresNode node, int32_t num_alike);
  cpu::SumArgs sum_args(const std::vector<ValueId>& parts) const;
  ValueId sum_value(ValueId part, ValueId residual);
  void keep(const std::vector<ValueId>& ids);
  ValueId add_sum(const std::vector<ValueId>& parts, const float* bias, ValueId residual);
  ValueId expert_input(ValueId x, ValueId routes, const cpu::PackedLinear& weight);
  void check_adapters(const StepView& step) const;
  void fuse_argmax();
  int64_t row_capacity(const Value& value) const;
  void reserve_expert_rows();
  void check_files() const;
  void run_nodes(const StepView& step, ThreadPool& pool, std::vector<cpu::Scratch>& scratch);
  void run_measured(const StepView& step, ThreadPool& pool, std::vector<cpu::Scratch>& scratch);
  int64_t value_bytes(const Value& value) const;
  void assign_offsets();

  void begin_step(const StepView& step);
  void check_ranks() const;
  void wait_for_ranks(const Node& node);
  void link_sum(Node& node) const;
  void link_slices(Node& node) const;
  uint8_t* shared_pointer(const Value& value) const;

  int64_t start_node(int32_t node_id, const StepView& step, int32_t num_threads);
  void run_chunk(int32_t node_id, int64_t chunk, int32_t num_threads, cpu::Scratch& scratch) const;

  uint8_t* pointer(ValueId id) const;
  int64_t num_rows(ValueId id, const StepView& step) const;

  // Fills in what is fixed after finish(): pointers to values, by their fields' names.
  void link(Node& node) const;
  // Fills in what a step decides: row counts, the step itself.
  void bind(Node& node, const StepView& step) const;

  GraphConfig config_;
  const cpu::Kernels& kernels_;
  std::vector<Node> nodes_;
  std::vector<std::shared_ptr<const MappedFile>> files_;
  std::vector<Value> values_;
  std::vector<ValueId> outputs_;
  const LoraTable* adapters_ = nullptr;
  RankGroup* group_ = nullptr;
  int32_t num_turns_ = 0;
  ValueId routes_ = -1;  // of the last route
  cpu::ExpertRows expert_rows_;
  AlignedMemory expert_memory_;
  std::optional<KvCacheView> cache_;
  AlignedMemory arena_;
  AlignedMemory attention_workspace_;
  std::unique_ptr<uint64_t[]> argmax_candidates_;  // of logit rows
  std::unique_ptr<uint8_t[]> wants_argmax_;
  std::unique_ptr<int32_t[]> next_slots_;  // of the positions behind logit rows
  int64_t attention_workspace_bytes_ = 0;
  std::vector<NodeTime> node_times_;
  int32_t measured_tokens_ = 0;
  int32_t measured_as_threads_ = 0;
  bool finished_ = false;
};

}  // namespace lmi
