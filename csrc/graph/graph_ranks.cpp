// Recording of sums over slices of inputs, and of what ranks have in common.
#include <utility>

#include "common/check.h"
#include "graph/graph.h"
#include "graph/rank_group.h"

namespace lmi {

void Graph::join(RankGroup& group) {
  check_recording();
  LMI_CHECK(nodes_.empty() && group_ == nullptr, "a graph joins one group, before it is recorded");
  LMI_CHECK(group.sizes().num_ranks > 1, "a group of one rank");
  const StepCapacity &own = config_.capacity, &common = group.sizes().capacity;
  LMI_CHECK(own.max_tokens == common.max_tokens && own.max_logit_rows == common.max_logit_rows,
            "steps of ", own.max_tokens, " tokens and ", own.max_logit_rows,
            " rows of logits, the group's have ", common.max_tokens, " and ",
            common.max_logit_rows);
  group_ = &group;
}

cpu::QuantizeRowsArgs Graph::quantize_args(ValueId x, const cpu::PackedLinear& weight) const {
  return {.x_dtype = config_.act_dtype,
          .x_stride = value(x).columns,
          .num_columns = weight.num_inputs,
          .group_size = weight.group_size,
          .rounding = weight.rounding,
          .input_order = weight.input_order};
}

ValueId Graph::quantized_value(ValueId x, const cpu::PackedLinear& weight) {
  const int64_t row_bytes =
      cpu::quantized_row_bytes(weight.num_inputs, weight.group_size, weight.rounding);
  const ValueId y = add_value("quantized", DType::kI8, row_bytes, value(x).rows);
  values_[y].rows_per_token = value(x).rows_per_token;
  return y;
}

// What each slice's product reads: columns of x, or their quantised rows, which are made at once.
std::vector<Graph::SliceInput> Graph::slice_inputs(ValueId x,
                                                   const std::vector<cpu::LinearArgs>& slices) {
  QuantizeSlicesNode node{{}, x, {}, {}, {}};
  std::vector<SliceInput> inputs;
  int64_t first_input = 0;
  for (const cpu::LinearArgs& slice : slices) {
    const cpu::PackedLinear& weight = slice.weight;
    const DType dtype = weight.is_quantized() ? config_.act_dtype : weight.dtype;
    check_operand(x, dtype, value(x).columns, "a sum over slices");
    inputs.push_back({x, first_input});
    if (weight.takes_quantized_rows()) {
      node.slices.push_back(quantize_args(x, weight));
      node.inputs.push_back(inputs.back());
      node.ys.push_back(quantized_value(x, weight));
      inputs.back() = {node.ys.back(), 0};
    }
    first_input += weight.num_inputs;
  }
  check_operand(x, value(x).dtype, first_input, "a sum over slices");
  if (!node.ys.empty()) add_node(node, {x});
  return inputs;
}

// The first of a rank's goes where the other ranks find it.
ValueId Graph::partial_value(RowSymbol rows, int64_t columns, bool is_first) {
  LMI_CHECK(rows == RowSymbol::kTokens, "sums are over token rows");
  const ValueId y = add_value("partial", DType::kF32, columns, rows);
  if (group_ == nullptr || !is_first) return y;
  LMI_CHECK(columns == group_->sizes().num_columns, "sums of ", columns, " columns in a group of ",
            group_->sizes().num_columns);
  values_[y].memory = ValueMemory::kPartial;
  values_[y].turn = num_turns_;
  return y;
}

cpu::SumArgs Graph::sum_args(const std::vector<ValueId>& parts) const {
  cpu::SumArgs args;
  args.num_parts = static_cast<int32_t>(parts.size());
  args.num_columns = value(parts[0]).columns;
  LMI_CHECK(args.num_parts <= cpu::kMaxSumParts, args.num_parts, " parts of a sum");
  return args;
}

// Where a sum of parts like this one goes.
ValueId Graph::sum_value(ValueId part, ValueId residual) {
  const int64_t columns = value(part).columns;
  if (residual < 0) return add_value("sum", DType::kF32, columns, value(part).rows);
  check_operand(residual, DType::kF32, columns, "a sum's residual");
  LMI_CHECK(value(residual).rows == value(part).rows, "the residual has other rows");
  return residual;
}

// Until the last node.
void Graph::keep(const std::vector<ValueId>& ids) {
  for (const ValueId id : ids) values_[id].last_node = static_cast<int32_t>(nodes_.size()) - 1;
}

ValueId Graph::add_sum(const std::vector<ValueId>& parts, const float* bias, ValueId residual) {
  cpu::SumArgs args = sum_args(parts);
  if (group_ != nullptr && parts.size() > 1) add_node(SumNode{args, parts[0], parts}, {parts[0]});
  args.bias = bias;
  args.add_to_y = residual >= 0;
  const ValueId y = sum_value(parts[0], residual);
  if (group_ != nullptr) {
    args.num_parts = group_->sizes().num_ranks;
    add_node(AllReduceNode{args, y, num_turns_++}, {parts[0], y});
  } else {
    add_node(SumNode{args, y, parts}, {y});
  }
  keep(parts);
  return y;
}

// A node of all slices, whose sum other ranks add to.
ValueId Graph::add_slices(ValueId x, std::vector<cpu::LinearArgs> slices,
                          std::vector<SliceInput> inputs, const float* bias, ValueId residual) {
  SummedLinearNode node{{}, x, -1, std::move(slices), std::move(inputs), {}};
  for (size_t i = 0; i < node.slices.size(); ++i) {
    node.slices[i].add_to_y = i % 2 == 1;
    if (i % 2 == 1) continue;
    node.parts.push_back(partial_value(value(x).rows, node.slices[i].weight.num_outputs, i == 0));
  }
  cpu::SumArgs& sum = node.args.sum = sum_args(node.parts);
  const ValueId first = node.parts[0];
  if (group_ == nullptr) {
    sum.bias = bias;
    sum.add_to_y = residual >= 0;
  }
  node.y = group_ == nullptr ? sum_value(first, residual) : first;
  std::vector<ValueId> operands = node.parts;
  for (const SliceInput& input : node.inputs) operands.push_back(input.id);
  const ValueId y = node.y;
  add_node(std::move(node), {y});
  keep(operands);
  return group_ == nullptr ? y : add_sum({first}, bias, residual);
}

ValueId Graph::summed_linear(ValueId x, std::vector<cpu::LinearArgs> slices, const float* bias,
                             ValueId residual, const LoraTable* table,
                             const std::vector<int32_t>& linear_ids) {
  check_recording();
  LMI_CHECK(!slices.empty(), "a linear has a weight");
  LMI_CHECK(table == nullptr || linear_ids.size() == slices.size(), linear_ids.size(),
            " linears of adapters for ", slices.size(), " slices");
  for (cpu::LinearArgs& args : slices) {
    LMI_CHECK(args.activation == cpu::Activation::kNone && !args.weight.gated &&
                  args.weight.num_outputs == slices[0].weight.num_outputs,
              "slices are of one plain linear");
    args.x_dtype = config_.act_dtype;
    args.y_dtype = DType::kF32;
  }
  const std::vector<SliceInput> inputs = slice_inputs(x, slices);
  if (table == nullptr && slices.size() > 1) return add_slices(x, slices, inputs, bias, residual);
  // What adapters add to a slice's product comes before the products are summed.
  std::vector<ValueId> parts;
  int64_t first_input = 0;
  for (size_t i = 0; i < slices.size(); ++i) {
    const int64_t columns = slices[i].weight.num_outputs;
    parts.push_back(partial_value(value(x).rows, columns, parts.empty()));
    LinearNode node{slices[i], inputs[i].id, parts.back()};
    node.first_input = inputs[i].first_input;
    add_node(node, {node.x, node.y});
    if (table != nullptr) lora_add(x, parts.back(), *table, linear_ids[i], first_input);
    first_input += slices[i].weight.num_inputs;
  }
  return add_sum(parts, bias, residual);
}

ValueId Graph::summed_experts(ValueId x, ValueId routes, const std::vector<cpu::LinearArgs>& slices,
                              ValueId residual) {
  check_recording();
  LMI_CHECK(!slices.empty() && routes == routes_, "experts go with the last route");
  LMI_CHECK(value(x).rows == RowSymbol::kExperts, "experts' sums are of what experts gave");
  const std::vector<SliceInput> inputs = slice_inputs(x, slices);
  std::vector<ValueId> parts;
  for (size_t i = 0; i < slices.size(); ++i) {
    cpu::LinearArgs args = slices[i];
    const int64_t columns = args.weight.num_outputs;
    const ValueId y = partial_value(RowSymbol::kTokens, columns, parts.empty());
    cpu::SumArgs zeros;
    zeros.num_columns = columns;
    add_node(SumNode{zeros, y, {}}, {y});
    args.x_dtype = config_.act_dtype;
    args.add_to_y = true;
    args.y_dtype = DType::kF32;
    GroupedLinearNode node{{args, {}, true}, inputs[i].id, y};
    node.first_input = inputs[i].first_input;
    add_node(node, {node.x, y, routes});
    parts.push_back(y);
  }
  return add_sum(parts, nullptr, residual);
}

ValueId Graph::norm_all_heads(ValueId qkv, const float* q_weight, const float* k_weight, float eps,
                              int64_t head_dim, int64_t num_q, int64_t num_k, int32_t num_alike) {
  check_recording();
  LMI_CHECK(head_dim > 0 && (num_q + num_k) * head_dim <= value(qkv).columns, num_q, " and ", num_k,
            " heads of ", head_dim, " in ", value(qkv).columns, " columns");
  check_operand(qkv, DType::kF32, value(qkv).columns, "norm_all_heads");
  LMI_CHECK(value(qkv).rows == RowSymbol::kTokens, "norm_all_heads takes token rows");
  const ValueId squares = add_value("squares", DType::kF32, num_q + num_k, RowSymbol::kTokens);
  if (group_ != nullptr) {
    LMI_CHECK(num_q + num_k <= group_->sizes().num_columns, num_q + num_k, " heads of a rank");
    values_[squares].memory = ValueMemory::kPartial;
    values_[squares].turn = num_turns_++;
  }
  const cpu::HeadSquaresArgs heads{.num_columns = head_dim, .num_groups = num_q + num_k};
  add_node(HeadSquaresNode{heads, qkv, squares}, {qkv, squares});
  cpu::NormBySquaresArgs args;
  args.part_stride = num_q + num_k;
  args.eps = eps;
  args.num_squares = num_q;
  args.weight = q_weight;
  args.num_columns = num_q * head_dim;
  NormBySquaresNode q{args, squares, qkv, 0, {}, group_ != nullptr};
  add_norm_by_squares(q, 1);
  args.num_squares = num_k;
  args.weight = k_weight;
  args.first_column = num_q * head_dim;
  args.num_columns = num_k * head_dim;
  NormBySquaresNode k{args, squares, qkv, num_q, {}};
  add_norm_by_squares(k, num_alike);
  return qkv;
}

// Of neighbours that have the same heads the first one's count.
void Graph::add_norm_by_squares(NormBySquaresNode node, int32_t num_alike) {
  const int32_t num_ranks = group_ == nullptr ? 1 : group_->sizes().num_ranks;
  LMI_CHECK(num_alike > 0 && num_ranks % num_alike == 0, num_alike, " of ", num_ranks,
            " ranks with the same heads");
  for (int32_t rank = 0; rank < num_ranks; rank += num_alike) node.ranks.push_back(rank);
  node.args.num_parts = static_cast<int32_t>(node.ranks.size());
  add_node(node, {node.squares, node.y});
}

ValueId Graph::gathered_linear(ValueId x, const std::vector<cpu::LinearArgs>& parts,
                               int64_t first_column) {
  check_recording();
  LMI_CHECK(group_ != nullptr, "logits are gathered from the ranks of a group");
  LMI_CHECK(value(x).rows == RowSymbol::kLogits, "logits are of logit rows");
  const int64_t columns = group_->sizes().vocab_size;
  const ValueId y = add_value("logits", DType::kF32, columns, RowSymbol::kLogits);
  values_[y].memory = ValueMemory::kLogits;
  for (cpu::LinearArgs args : parts) {
    const ValueId input = linear_input(x, args.weight);
    args.x_dtype = config_.act_dtype;
    args.y_dtype = DType::kF32;
    add_node(LinearNode{args, input, y, first_column}, {input, y});
    first_column += args.weight.num_outputs;
  }
  LMI_CHECK(first_column <= columns, "logits up to ", first_column, " of ", columns);
  return y;
}

void Graph::meet(ValueId x) {
  check_recording();
  LMI_CHECK(group_ != nullptr, "only the ranks of a group meet");
  add_node(MeetNode{}, {x});
}

// The other ranks begin with the step when rank 0 does.
void Graph::begin_step(const StepView& step) {
  if (group_ == nullptr) return;
  check_ranks();
  if (group_->rank() == 0) group_->publish(step);
}

void Graph::check_ranks() const {
  if (group_ != nullptr && group_->is_lost()) throw LostRankError(group_->reason());
}

// A node that reads what other ranks have written begins once all of them have.
void Graph::wait_for_ranks(const Node& node) {
  if (std::holds_alternative<AllReduceNode>(node)) {
    group_->meet(true);
  } else if (std::holds_alternative<MeetNode>(node)) {
    group_->meet(group_->rank() == 0);
  } else if (const auto* norm = std::get_if<NormBySquaresNode>(&node);
             norm != nullptr && norm->meets) {
    group_->meet(true);
  }
}

uint8_t* Graph::shared_pointer(const Value& value) const {
  float* memory = value.memory == ValueMemory::kLogits
                      ? group_->logits()
                      : group_->partial(value.turn, group_->rank());
  return reinterpret_cast<uint8_t*>(memory);
}

void Graph::link_slices(Node& node) const {
  const auto link = [this](auto& args, auto& slices, const std::vector<SliceInput>& inputs) {
    for (size_t i = 0; i < slices.size(); ++i) {
      const Value& x = values_[inputs[i].id];
      slices[i].x = pointer(inputs[i].id) + inputs[i].first_input * dtype_size(x.dtype);
      slices[i].x_stride = x.columns;
    }
    args.slices = slices.data();
    args.num_slices = static_cast<int32_t>(slices.size());
  };
  if (auto* quantize = std::get_if<QuantizeSlicesNode>(&node)) {
    link(quantize->args, quantize->slices, quantize->inputs);
    for (size_t i = 0; i < quantize->ys.size(); ++i) {
      quantize->slices[i].y = pointer(quantize->ys[i]);
    }
  } else if (auto* linear = std::get_if<SummedLinearNode>(&node)) {
    link(linear->args, linear->slices, linear->inputs);
    cpu::SumArgs& sum = linear->args.sum;
    sum.y = reinterpret_cast<float*>(pointer(linear->y));
    for (size_t i = 0; i < linear->slices.size(); ++i) {
      float* part = reinterpret_cast<float*>(pointer(linear->parts[i / 2]));
      sum.parts[i / 2] = part;
      linear->slices[i].y = part;
      linear->slices[i].y_stride = sum.num_columns;
    }
  }
}

void Graph::link_sum(Node& node) const {
  if (auto* sum = std::get_if<SumNode>(&node)) {
    for (size_t i = 0; i < sum->parts.size(); ++i) {
      sum->args.parts[i] = reinterpret_cast<const float*>(pointer(sum->parts[i]));
    }
  } else if (auto* reduce = std::get_if<AllReduceNode>(&node)) {
    for (int32_t rank = 0; rank < reduce->args.num_parts; ++rank) {
      reduce->args.parts[rank] = group_->partial(reduce->turn, rank);
    }
  } else if (auto* norm = std::get_if<NormBySquaresNode>(&node)) {
    const auto* own = reinterpret_cast<const float*>(pointer(norm->squares));
    for (size_t i = 0; i < norm->ranks.size(); ++i) {
      const int32_t turn = values_[norm->squares].turn;
      const float* of_rank = group_ == nullptr ? own : group_->partial(turn, norm->ranks[i]);
      norm->args.parts[i] = of_rank + norm->first_square;
    }
  }
}

}  // namespace lmi
