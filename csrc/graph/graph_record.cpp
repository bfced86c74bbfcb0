// Recording: each call checks its operands and appends a node.
#include <algorithm>
#include <utility>

#include "common/check.h"
#include "graph/graph.h"

namespace lmi {

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

ValueId Graph::add_positions(ValueId x, cpu::EmbedArgs args) {
  return add_rows(x, args, &StepView::positions);
}

ValueId Graph::add_token_types(ValueId x, cpu::EmbedArgs args) {
  return add_rows(x, args, &StepView::token_types);
}

ValueId Graph::add_rows(ValueId x, cpu::EmbedArgs args, int32_t* StepView::* ids) {
  check_recording();
  check_operand(x, DType::kF32, args.num_columns, "a table's rows");
  LMI_CHECK(value(x).rows == RowSymbol::kTokens, "a table's rows are added to token rows");
  args.add_to_y = true;
  add_node(EmbedNode{args, x, ids}, {x});
  return x;
}

ValueId Graph::norm(ValueId x, cpu::NormArgs args, const cpu::PackedLinear* reader) {
  check_recording();
  check_operand(x, DType::kF32, args.num_columns, "norm");
  int64_t columns = args.num_columns;
  if (reader != nullptr && reader->takes_quantized_rows()) {
    args.y_dtype = DType::kI8;
    args.group_size = reader->group_size;
    args.rounding = reader->rounding;
    args.input_order = reader->input_order;
    columns = cpu::quantized_row_bytes(columns, reader->group_size, reader->rounding);
  }
  const ValueId y = add_value("norm", args.y_dtype, columns, value(x).rows);
  add_node(NormNode{args, x, y}, {x, y});
  return y;
}

ValueId Graph::norm_add(ValueId x, ValueId residual, cpu::NormArgs args) {
  check_recording();
  check_operand(x, DType::kF32, args.num_columns, "norm");
  check_operand(residual, DType::kF32, args.num_columns, "norm's residual");
  LMI_CHECK(value(x).rows == value(residual).rows, "the residual has other rows");
  args.add_to_y = true;
  args.y_dtype = DType::kF32;
  add_node(NormNode{args, x, residual}, {x, residual});
  return residual;
}

ValueId Graph::norm_heads(ValueId x, cpu::NormArgs args) {
  check_recording();
  check_operand(x, DType::kF32, value(x).columns, "norm_heads");
  const int64_t end = args.first_column + args.num_groups * args.num_columns;
  LMI_CHECK(args.first_column >= 0 && end <= value(x).columns, "columns up to ", end, " of ",
            value(x).columns);
  args.y_dtype = DType::kF32;
  add_node(NormNode{args, x, x}, {x});
  return x;
}

// What the linear's kernel reads: x, or its quantised rows.
ValueId Graph::linear_input(ValueId x, const cpu::PackedLinear& weight) {
  const DType dtype = weight.is_quantized() ? config_.act_dtype : weight.dtype;
  const int64_t row_bytes =
      cpu::quantized_row_bytes(weight.num_inputs, weight.group_size, weight.rounding);
  if (weight.takes_quantized_rows() && value(x).dtype == DType::kI8) {
    check_operand(x, DType::kI8, row_bytes, "linear of quantised rows");
    return x;
  }
  check_operand(x, dtype, weight.num_inputs, "linear");
  if (!weight.takes_quantized_rows()) return x;
  const ValueId y = quantized_value(x, weight);
  add_node(QuantizeNode{quantize_args(x, weight), x, y}, {x, y});
  return y;
}

ValueId Graph::linear(ValueId x, cpu::LinearArgs args) {
  return linear(x, std::vector<cpu::LinearArgs>{args});
}

ValueId Graph::linear(ValueId x, const std::vector<cpu::LinearArgs>& parts) {
  check_recording();
  LMI_CHECK(!parts.empty(), "a linear has a weight");
  const bool is_gated = parts[0].weight.gated;
  LMI_CHECK(!is_gated || parts[0].activation != cpu::Activation::kNone,
            "a gated weight goes with an activation");
  LMI_CHECK(!is_gated || parts.size() == 1, "a gated weight has no parts of their own");
  int64_t columns = 0;
  std::vector<ValueId> inputs;
  for (const cpu::LinearArgs& part : parts) {
    LMI_CHECK(part.y_dtype == parts[0].y_dtype, "parts give one type");
    columns += is_gated ? part.weight.num_outputs / 2 : part.weight.num_outputs;
    const bool is_same = !inputs.empty() && part.weight.takes_rows_of(parts[0].weight);
    inputs.push_back(is_same ? inputs[0] : linear_input(x, part.weight));
  }
  const ValueId y =
      add_value(is_gated ? "gated_linear" : "linear", parts[0].y_dtype, columns, value(x).rows);
  int64_t first_column = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    cpu::LinearArgs args = parts[i];
    args.x_dtype = config_.act_dtype;
    args.add_to_y = false;
    add_node(LinearNode{args, inputs[i], y, first_column}, {inputs[i], y});
    first_column += args.weight.num_outputs;
  }
  return y;
}

ValueId Graph::linear_add(ValueId x, ValueId residual, cpu::LinearArgs args) {
  check_recording();
  check_operand(residual, DType::kF32, args.weight.num_outputs, "linear's residual");
  LMI_CHECK(args.activation == cpu::Activation::kNone && !args.weight.gated,
            "a residual is added to plain linears only");
  LMI_CHECK(value(x).rows == value(residual).rows, "the residual has other rows");
  args.x_dtype = config_.act_dtype;
  args.add_to_y = true;
  args.y_dtype = DType::kF32;
  const ValueId input = linear_input(x, args.weight);
  add_node(LinearNode{args, input, residual}, {input, residual});
  return residual;
}

ValueId Graph::activation(ValueId x, cpu::Activation activation, bool gated) {
  check_recording();
  const int64_t columns = value(x).columns / (gated ? 2 : 1);
  check_operand(x, DType::kF32, (gated ? 2 : 1) * columns, "activation");
  LMI_CHECK(activation != cpu::Activation::kNone, "an activation is needed");
  const ValueId y = add_value("activated", config_.act_dtype, columns, value(x).rows);
  const cpu::ActivationArgs args{.activation = activation,
                                 .gated = gated,
                                 .y_dtype = config_.act_dtype,
                                 .num_columns = columns};
  add_node(ActivationNode{args, x, y}, {x, y});
  return y;
}

ValueId Graph::bounded(ValueId x, cpu::Activation kind, float cap) {
  check_recording();
  const int64_t columns = value(x).columns;
  check_operand(x, DType::kF32, columns, "bounded");
  LMI_CHECK(cap > 0.0f, "cap ", cap);
  const cpu::ActivationArgs args{
      .activation = kind, .gated = false, .cap = cap, .num_columns = columns};
  add_node(ActivationNode{args, x, x}, {x});
  return x;
}

ValueId Graph::lora_add(ValueId x, ValueId y, const LoraTable& table, int32_t linear_id,
                        int64_t first_input) {
  check_recording();
  LMI_CHECK(adapters_ == nullptr || adapters_ == &table, "a graph has one table of adapters");
  adapters_ = &table;
  const LoraShape& shape = table.linear(linear_id);
  check_operand(x, table.dtype(), value(x).columns, "lora_add");
  LMI_CHECK(first_input >= 0 && first_input + shape.num_inputs <= value(x).columns,
            "lora_add takes columns ", first_input, " to ", first_input + shape.num_inputs, ", ",
            value(x).name, " has ", value(x).columns);
  check_operand(y, DType::kF32, shape.num_outputs, "lora_add's result");
  LMI_CHECK(value(x).rows == RowSymbol::kTokens && value(y).rows == RowSymbol::kTokens,
            "lora_add takes token rows");
  const cpu::LoraAddArgs args{
      .dtype = table.dtype(), .slots = table.slots(), .linear_id = linear_id};
  add_node(LoraAddNode{args, x, y, first_input}, {x, y});
  return y;
}

ValueId Graph::route(ValueId logits, cpu::RouteArgs args) {
  check_recording();
  check_operand(logits, DType::kF32, args.num_experts, "route");
  LMI_CHECK(value(logits).rows == RowSymbol::kTokens, "route takes token rows");
  LMI_CHECK(
      args.top_k > 0 && args.top_k <= args.num_experts && args.num_experts <= cpu::kMaxExperts,
      args.top_k, " of ", args.num_experts, " experts; at most ", cpu::kMaxExperts);
  LMI_CHECK(args.num_groups > 0 && args.num_experts % args.num_groups == 0 && args.top_groups > 0 &&
                args.top_groups <= args.num_groups &&
                args.top_k <= args.num_experts / args.num_groups * args.top_groups,
            args.top_k, " of ", args.num_experts, " experts in ", args.top_groups, " of ",
            args.num_groups, " groups");
  LMI_CHECK(
      args.group_best == 1 || (args.group_best == 2 && args.num_experts / args.num_groups >= 2),
      "groups scored by their best ", args.group_best, " experts");
  const ValueId y = add_value("routes", DType::kF32, 2 * args.top_k, RowSymbol::kTokens);
  cpu::GroupRowsArgs groups;
  groups.num_experts = args.num_experts;
  groups.top_k = args.top_k;
  add_node(RouteNode{args, logits, y}, {logits, y});
  add_node(GroupRowsNode{groups, y}, {y});
  return routes_ = y;
}

// What the grouped linear's kernel reads: a row for each expert that a token has.
ValueId Graph::expert_input(ValueId x, ValueId routes, const cpu::PackedLinear& weight) {
  LMI_CHECK(routes == routes_, "grouped linears go with the last route");
  const ValueId input = linear_input(x, weight);
  if (value(input).rows == RowSymbol::kExperts || weight.num_experts == 1) return input;
  const Value& rows = value(input);
  const int64_t row_bytes = rows.columns * dtype_size(rows.dtype);
  LMI_CHECK(rows.rows == RowSymbol::kTokens && row_bytes % 4 == 0, "rows of ", row_bytes,
            " bytes for experts");
  const ValueId y = add_value("routed", rows.dtype, rows.columns, RowSymbol::kExperts);
  values_[y].rows_per_token = static_cast<int32_t>(value(routes).columns / 2);
  add_node(GatherNode{{.num_columns = row_bytes / 4}, input, y}, {input, y});
  return y;
}

ValueId Graph::grouped_linear(ValueId x, ValueId routes, cpu::LinearArgs args) {
  check_recording();
  args.x_dtype = config_.act_dtype;
  const bool is_gated = args.weight.gated;
  LMI_CHECK(!is_gated || args.activation != cpu::Activation::kNone,
            "a gated weight goes with an activation");
  const ValueId input = expert_input(x, routes, args.weight);
  const ValueId y = add_value("grouped_linear", args.y_dtype,
                              args.weight.num_outputs / (is_gated ? 2 : 1), RowSymbol::kExperts);
  values_[y].rows_per_token = static_cast<int32_t>(value(routes).columns / 2);
  add_node(GroupedLinearNode{{args, {}, false}, input, y}, {input, y, routes});
  return y;
}

ValueId Graph::grouped_linear_add(ValueId x, ValueId routes, ValueId residual,
                                  cpu::LinearArgs args) {
  check_recording();
  check_operand(residual, DType::kF32, args.weight.num_outputs, "the experts' residual");
  LMI_CHECK(args.activation == cpu::Activation::kNone && !args.weight.gated &&
                value(residual).rows == RowSymbol::kTokens,
            "experts' sums are of plain linears, over token rows");
  args.x_dtype = config_.act_dtype;
  args.add_to_y = true;
  args.y_dtype = DType::kF32;
  const ValueId input = expert_input(x, routes, args.weight);
  add_node(GroupedLinearNode{{args, {}, true}, input, residual}, {input, residual, routes});
  return residual;
}

ValueId Graph::head_linear(ValueId x, cpu::LinearArgs args) {
  check_recording();
  const cpu::PackedLinear& weight = args.weight;
  LMI_CHECK(!weight.is_quantized() && !weight.gated, "heads' matrices aren't quantised or gated");
  check_operand(x, weight.dtype, weight.num_experts * weight.num_inputs, "head_linear");
  args.x_dtype = config_.act_dtype;
  const ValueId y = add_value("head_linear", args.y_dtype, weight.num_experts * weight.num_outputs,
                              value(x).rows);
  add_node(HeadLinearNode{{args}, x, y}, {x, y});
  return y;
}

ValueId Graph::rope_cache_write(ValueId qkv, cpu::RopeCacheArgs args, ValueId latent) {
  check_recording();
  const KvCacheView& cache = args.cache;
  LMI_CHECK(value(qkv).rows == RowSymbol::kTokens, "rope_cache_write takes token rows");
  const int32_t num_rest = latent >= 0 ? 0 : 2 * cache.num_kv_heads;
  check_operand(qkv, DType::kF32,
                static_cast<int64_t>(args.num_q_heads + num_rest) * cache.head_dim,
                "rope_cache_write");
  LMI_CHECK(cache.is_latent == (latent >= 0), "a latent goes with a cache of keys alone");
  if (latent >= 0) {
    check_operand(latent, DType::kF32, cache.head_dim, "rope_cache_write's latent");
    LMI_CHECK(cache.num_kv_heads == 1, "a latent is one head, of ", cache.num_kv_heads);
  }
  LMI_CHECK(args.num_q_heads % cache.num_kv_heads == 0, args.num_q_heads, " query heads over ",
            cache.num_kv_heads, " KV heads");
  LMI_CHECK(args.layer >= 0 && args.layer < cache.num_layers, "layer ", args.layer);
  LMI_CHECK(args.rotary_dim % 2 == 0 && args.rotary_dim <= cache.head_dim, "rotary size ",
            args.rotary_dim, " of head size ", cache.head_dim);
  args.q_dtype = config_.act_dtype;
  const ValueId q =
      add_value("q", config_.act_dtype, static_cast<int64_t>(args.num_q_heads) * cache.head_dim,
                RowSymbol::kTokens);
  if (!cache_) cache_ = cache;
  add_node(RopeCacheNode{args, qkv, q, latent}, {qkv, q});
  if (latent >= 0) values_[latent].last_node = static_cast<int32_t>(nodes_.size()) - 1;
  return q;
}

ValueId Graph::attention(ValueId q, cpu::AttentionArgs args) {
  check_recording();
  const KvCacheView& cache = args.cache;
  const int64_t columns = static_cast<int64_t>(args.num_q_heads) * cache.head_dim;
  check_operand(q, config_.act_dtype, columns, "attention");
  LMI_CHECK(args.window >= 0 && args.soft_cap >= 0.0f, "window ", args.window, ", soft cap ",
            args.soft_cap);
  LMI_CHECK(!args.sees_later || cache.dtype != DType::kI8,
            "attention of whole sequences has no int8 cache");
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

}  // namespace lmi
