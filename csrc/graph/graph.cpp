#include "graph/graph.h"

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "cpu/sampling_row.h"

namespace lmi {
namespace {

constexpr int64_t kAlignment = 64;

int64_t align_up(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

Graph::Graph(const GraphConfig& config)
    : config_(config), kernels_(cpu::kernels(config.instruction_set)) {
  LMI_CHECK(config.act_dtype == DType::kF32 || config.act_dtype == DType::kBF16,
            "activations are fp32 or bf16, not ", dtype_name(config.act_dtype));
}

// --- recording

void Graph::check_recording() const { LMI_CHECK(!finished_, "the graph is finished"); }

const Value& Graph::value(ValueId id) const {
  LMI_CHECK(id >= 0 && id < static_cast<ValueId>(values_.size()), "value id ", id);
  return values_[id];
}

void Graph::check_operand(ValueId id, DType dtype, int64_t columns, const char* what) const {
  const Value& operand = value(id);
  LMI_CHECK(operand.dtype == dtype, what, " takes ", dtype_name(dtype), ", ", operand.name, " is ",
            dtype_name(operand.dtype));
  LMI_CHECK(operand.columns == columns, what, " takes ", columns, " columns, ", operand.name,
            " has ", operand.columns);
}

ValueId Graph::add_value(std::string name, DType dtype, int64_t columns, RowSymbol rows) {
  const auto node = static_cast<int32_t>(nodes_.size());
  values_.push_back({.name = std::move(name) + std::to_string(values_.size()),
                     .dtype = dtype,
                     .columns = columns,
                     .rows = rows,
                     .first_node = node,
                     .last_node = node});
  return static_cast<ValueId>(values_.size() - 1);
}

// Operands live at least until this node.
void Graph::add_node(Node node, std::initializer_list<ValueId> operands) {
  for (const ValueId id : operands) values_[id].last_node = static_cast<int32_t>(nodes_.size());
  nodes_.push_back(std::move(node));
}

ValueId Graph::embed(cpu::EmbedArgs args) {
  check_recording();
  LMI_CHECK(args.table != nullptr && args.num_columns > 0, "embed needs a table");
  const ValueId y = add_value("embed", DType::kF32, args.num_columns, RowSymbol::kTokens);
  add_node(EmbedNode{args, y}, {y});
  return y;
}

ValueId Graph::rms_norm(ValueId x, cpu::RmsNormArgs args) {
  check_recording();
  const int64_t columns = value(x).columns;
  check_operand(x, DType::kF32, args.num_columns, "rms_norm");
  args.y_dtype = config_.act_dtype;
  const ValueId y = add_value("norm", config_.act_dtype, columns, value(x).rows);
  add_node(RmsNormNode{args, x, y}, {x, y});
  return y;
}

// What the linear's kernel reads: x, or its quantised rows.
ValueId Graph::linear_input(ValueId x, const cpu::PackedLinear& weight) {
  const DType dtype = weight.is_quantized() ? config_.act_dtype : weight.dtype;
  check_operand(x, dtype, weight.num_inputs, "linear");
  if (!weight.is_quantized()) return x;
  const int64_t row_bytes = cpu::quantized_row_bytes(weight.num_inputs, weight.group_size);
  const ValueId y = add_value("quantized", DType::kI8, row_bytes, value(x).rows);
  const cpu::QuantizeRowsArgs args{.x_dtype = dtype,
                                   .x_stride = weight.num_inputs,
                                   .num_columns = weight.num_inputs,
                                   .group_size = weight.group_size};
  add_node(QuantizeNode{args, x, y}, {x, y});
  return y;
}

ValueId Graph::linear(ValueId x, cpu::LinearArgs args) {
  check_recording();
  const ValueId input = linear_input(x, args.weight);
  const bool is_gated = args.activation != cpu::Activation::kNone;
  LMI_CHECK(is_gated == args.weight.gated, "a gated weight goes with an activation");
  const int64_t columns = is_gated ? args.weight.num_outputs / 2 : args.weight.num_outputs;
  args.add_to_y = false;
  const ValueId y =
      add_value(is_gated ? "gated_linear" : "linear", args.y_dtype, columns, value(x).rows);
  add_node(LinearNode{args, input, y}, {input, y});
  return y;
}

ValueId Graph::linear_add(ValueId x, ValueId residual, cpu::LinearArgs args) {
  check_recording();
  check_operand(residual, DType::kF32, args.weight.num_outputs, "linear's residual");
  LMI_CHECK(args.activation == cpu::Activation::kNone && !args.weight.gated,
            "a residual is added to plain linears only");
  LMI_CHECK(value(x).rows == value(residual).rows, "the residual has other rows");
  args.add_to_y = true;
  args.y_dtype = DType::kF32;
  const ValueId input = linear_input(x, args.weight);
  add_node(LinearNode{args, input, residual}, {input, residual});
  return residual;
}

ValueId Graph::rope_cache_write(ValueId qkv, cpu::RopeCacheArgs args) {
  check_recording();
  const KvCacheView& cache = args.cache;
  LMI_CHECK(value(qkv).rows == RowSymbol::kTokens, "rope_cache_write takes token rows");
  check_operand(qkv, DType::kF32,
                static_cast<int64_t>(args.num_q_heads + 2 * cache.num_kv_heads) * cache.head_dim,
                "rope_cache_write");
  LMI_CHECK(args.num_q_heads % cache.num_kv_heads == 0, args.num_q_heads, " query heads over ",
            cache.num_kv_heads, " KV heads");
  LMI_CHECK(args.layer >= 0 && args.layer < cache.num_layers, "layer ", args.layer);
  LMI_CHECK(args.rotary_dim % 2 == 0 && args.rotary_dim <= cache.head_dim, "rotary size ",
            args.rotary_dim, " of head size ", cache.head_dim);
  args.q_dtype = config_.act_dtype;
  const ValueId q =
      add_value("q", config_.act_dtype, static_cast<int64_t>(args.num_q_heads) * cache.head_dim,
                RowSymbol::kTokens);
  add_node(RopeCacheNode{args, qkv, q}, {qkv, q});
  return q;
}

ValueId Graph::attention(ValueId q, cpu::AttentionArgs args) {
  check_recording();
  const KvCacheView& cache = args.cache;
  const int64_t columns = static_cast<int64_t>(args.num_q_heads) * cache.head_dim;
  check_operand(q, config_.act_dtype, columns, "attention");
  LMI_CHECK(args.window >= 0 && args.soft_cap >= 0.0f, "window ", args.window, ", soft cap ",
            args.soft_cap);
  args.q_dtype = args.y_dtype = config_.act_dtype;
  attention_workspace_bytes_ =
      std::max(attention_workspace_bytes_,
               cpu::attention_workspace_bytes(config_.capacity, args.num_q_heads, cache));
  const ValueId y = add_value("attention", config_.act_dtype, columns, RowSymbol::kTokens);
  add_node(AttentionNode{args, q, y}, {q, y});
  return y;
}

ValueId Graph::gather_logit_rows(ValueId x) {
  check_recording();
  const int64_t columns = value(x).columns;
  check_operand(x, DType::kF32, columns, "gather_logit_rows");
  LMI_CHECK(value(x).rows == RowSymbol::kTokens, "gather_logit_rows takes token rows");
  const ValueId y = add_value("gathered", DType::kF32, columns, RowSymbol::kLogits);
  add_node(GatherNode{{.num_columns = columns}, x, y}, {x, y});
  return y;
}

void Graph::sample(ValueId logits) {
  check_recording();
  const int64_t columns = value(logits).columns;
  check_operand(logits, DType::kF32, columns, "sample");
  LMI_CHECK(value(logits).rows == RowSymbol::kLogits, "sample takes logit rows");
  LMI_CHECK(columns <= cpu::kMaxVocabSize, "a vocabulary of ", columns, " is more than ",
            cpu::kMaxVocabSize);
  cpu::SampleArgs args;
  args.logits_stride = args.vocab_size = columns;
  add_node(SampleNode{args, logits}, {logits});
}

void Graph::output(ValueId x) {
  check_recording();
  value(x);
  outputs_.push_back(x);
}

void Graph::finish() {
  check_recording();
  LMI_CHECK(!nodes_.empty(), "nothing was recorded");
  for (const Node& node : nodes_) {
    std::visit(
        [this](const auto& n) {
          LMI_CHECK(kernel(n).run != nullptr, "an op has no kernel for instruction set ",
                    cpu::instruction_set_name(config_.instruction_set));
        },
        node);
  }
  for (const ValueId id : outputs_) values_[id].last_node = static_cast<int32_t>(nodes_.size());
  fuse_quantization();
  fuse_argmax();
  assign_offsets();
  for (const Node& node : nodes_) {
    if (const auto* rope = std::get_if<RopeCacheNode>(&node)) {
      nodes_.insert(nodes_.begin(), BlockCopyNode{{.cache = rope->args.cache}});
      break;
    }
  }
  if (attention_workspace_bytes_ > 0) {
    attention_workspace_ = AlignedMemory(attention_workspace_bytes_);
  }
  for (Node& node : nodes_) std::visit([this](auto& n) { link(n); }, node);
  finished_ = true;
}

// A norm whose rows are quantised by the next node and read by no other writes them quantised.
void Graph::fuse_quantization() {
  std::vector<Node> nodes;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const auto* quantize = std::get_if<QuantizeNode>(&nodes_[i]);
    auto* norm = nodes.empty() ? nullptr : std::get_if<RmsNormNode>(&nodes.back());
    if (quantize == nullptr || norm == nullptr || norm->y != quantize->x ||
        values_[quantize->x].last_node != static_cast<int32_t>(i)) {
      nodes.push_back(std::move(nodes_[i]));
      continue;
    }
    norm->args.y_dtype = DType::kI8;
    norm->args.group_size = quantize->args.group_size;
    norm->y = quantize->y;
    values_[norm->y].first_node = static_cast<int32_t>(i) - 1;
  }
  nodes_ = std::move(nodes);
}

// The linear right before sample finds the tokens of greedy rows itself, unless its outputs are
// kept.
void Graph::fuse_argmax() {
  for (size_t i = 1; i < nodes_.size(); ++i) {
    auto* sample = std::get_if<SampleNode>(&nodes_[i]);
    auto* linear = std::get_if<LinearNode>(&nodes_[i - 1]);
    if (sample == nullptr || linear == nullptr || linear->y != sample->logits) continue;
    const cpu::LinearArgs& args = linear->args;
    const bool is_kept = std::find(outputs_.begin(), outputs_.end(), linear->y) != outputs_.end();
    if (is_kept || args.bias != nullptr || args.add_to_y || args.weight.gated) continue;
    linear->feeds_sample = sample->follows_linear = true;
    argmax_candidates_ = std::make_unique<uint64_t[]>(config_.capacity.max_logit_rows);
    wants_argmax_ = std::make_unique<uint8_t[]>(config_.capacity.max_logit_rows);
  }
}

int64_t Graph::row_capacity(RowSymbol rows) const {
  return rows == RowSymbol::kTokens ? config_.capacity.max_tokens : config_.capacity.max_logit_rows;
}

int64_t Graph::value_bytes(const Value& value) const {
  return align_up(row_capacity(value.rows) * value.columns * dtype_size(value.dtype));
}

// First fit, largest values first: a value takes the lowest offset where it overlaps no placed
// value that is alive at the same time.
void Graph::assign_offsets() {
  std::vector<Value*> order;
  for (Value& value : values_) order.push_back(&value);
  std::stable_sort(order.begin(), order.end(), [this](const Value* a, const Value* b) {
    return value_bytes(*a) > value_bytes(*b);
  });
  std::vector<const Value*> placed;  // by offset
  int64_t total = 0;
  for (Value* value : order) {
    const int64_t bytes = value_bytes(*value);
    int64_t offset = 0;
    for (const Value* other : placed) {
      const bool both_alive =
          value->first_node <= other->last_node && other->first_node <= value->last_node;
      if (!both_alive) continue;
      if (offset + bytes <= other->offset) break;
      offset = std::max(offset, other->offset + value_bytes(*other));
    }
    value->offset = offset;
    total = std::max(total, offset + bytes);
    placed.insert(
        std::upper_bound(placed.begin(), placed.end(), value,
                         [](const Value* a, const Value* b) { return a->offset < b->offset; }),
        value);
  }
  arena_ = AlignedMemory(std::max<int64_t>(total, kAlignment));
}

const uint8_t* Graph::data(ValueId id) const {
  LMI_CHECK(finished_, "the graph isn't finished");
  value(id);
  return pointer(id);
}

// --- replay

uint8_t* Graph::pointer(ValueId id) const { return arena_.data() + values_[id].offset; }

int64_t Graph::num_rows(ValueId id, const StepView& step) const {
  return values_[id].rows == RowSymbol::kTokens ? step.num_tokens : step.num_logit_rows;
}

void Graph::link(EmbedNode& node) const { node.args.y = reinterpret_cast<float*>(pointer(node.y)); }

void Graph::link(RmsNormNode& node) const {
  node.args.x = reinterpret_cast<const float*>(pointer(node.x));
  node.args.y = pointer(node.y);
}

void Graph::link(QuantizeNode& node) const {
  node.args.x = pointer(node.x);
  node.args.y = pointer(node.y);
}

void Graph::link(LinearNode& node) const {
  node.args.x = pointer(node.x);
  node.args.x_stride = values_[node.x].columns;
  node.args.y = pointer(node.y);
  node.args.y_stride = values_[node.y].columns;
  node.args.argmax.candidates = argmax_candidates_.get();
}

void Graph::link(RopeCacheNode& node) const {
  node.args.qkv = reinterpret_cast<const float*>(pointer(node.qkv));
  node.args.q = pointer(node.q);
}

void Graph::link(AttentionNode& node) const {
  node.args.q = pointer(node.q);
  node.args.y = pointer(node.y);
  node.args.workspace = attention_workspace_.data();
}

void Graph::link(GatherNode& node) const {
  node.args.x = reinterpret_cast<const float*>(pointer(node.x));
  node.args.y = reinterpret_cast<float*>(pointer(node.y));
}

void Graph::link(SampleNode& node) const {
  node.args.logits = reinterpret_cast<const float*>(pointer(node.logits));
  if (node.follows_linear) node.args.argmax = {wants_argmax_.get(), argmax_candidates_.get()};
}

void Graph::bind(EmbedNode& node, const StepView& step) const {
  node.args.token_ids = step.token_ids;
  node.args.num_rows = step.num_tokens;
}

void Graph::bind(RmsNormNode& node, const StepView& step) const {
  node.args.num_rows = num_rows(node.x, step);
}

void Graph::bind(QuantizeNode& node, const StepView& step) const {
  node.args.num_rows = num_rows(node.x, step);
}

void Graph::bind(LinearNode& node, const StepView& step) const {
  node.args.num_rows = num_rows(node.x, step);
  if (!node.feeds_sample) return;
  const int64_t num_marked = cpu::mark_argmax_rows(step, wants_argmax_.get());
  node.args.argmax.is_wanted = num_marked > 0 ? wants_argmax_.get() : nullptr;
  std::fill_n(argmax_candidates_.get(), step.num_logit_rows, 0);
}

void Graph::bind(GatherNode& node, const StepView& step) const {
  node.args.rows = step.logit_token_rows;
  node.args.num_rows = step.num_logit_rows;
}

// The node's chunks for this step.
int64_t Graph::start_node(int32_t node_id, const StepView& step, int32_t num_threads) {
  return std::visit(
      [&](auto& node) {
        bind(node, step);
        return kernel(node).num_chunks(node.args, num_threads);
      },
      nodes_[node_id]);
}

void Graph::run_chunk(int32_t node_id, int64_t chunk, int32_t num_threads,
                      cpu::Scratch& scratch) const {
  std::visit([&](const auto& node) { kernel(node).run(node.args, chunk, num_threads, scratch); },
             nodes_[node_id]);
}

void Graph::run(const StepView& step, ThreadPool& pool, std::vector<cpu::Scratch>& scratch) {
  LMI_CHECK(finished_, "the graph isn't finished");
  if (step.num_tokens == measured_tokens_) return run_measured(step, pool, scratch);
  const int32_t num_threads = pool.num_threads();
  pool.run(
      static_cast<int32_t>(nodes_.size()),
      [&](int32_t node_id) { return start_node(node_id, step, num_threads); },
      [&](int32_t node_id, int64_t chunk, int32_t thread_id) {
        run_chunk(node_id, chunk, num_threads, scratch[thread_id]);
      });
}

}  // namespace lmi
