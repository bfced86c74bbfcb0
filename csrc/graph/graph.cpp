#include "graph/graph.h"

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "cpu/sampling_row.h"
#include "graph/arena.h"

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

void Graph::assign_offsets() {
  std::vector<ArenaValue> places;
  for (const Value& value : values_) {
    places.push_back({.num_bytes = value_bytes(value),
                      .first_node = value.first_node,
                      .last_node = value.last_node});
  }
  const int64_t num_bytes = lmi::assign_offsets(places);
  for (size_t i = 0; i < places.size(); ++i) values_[i].offset = places[i].offset;
  arena_ = AlignedMemory(std::max(num_bytes, kAlignment));
}

const uint8_t* Graph::data(ValueId id) const {
  LMI_CHECK(finished_, "the graph isn't finished");
  value(id);
  return pointer(id);
}

uint8_t* Graph::pointer(ValueId id) const { return arena_.data() + values_[id].offset; }

int64_t Graph::num_rows(ValueId id, const StepView& step) const {
  return values_[id].rows == RowSymbol::kTokens ? step.num_tokens : step.num_logit_rows;
}

void Graph::link(EmbedNode& node) const { node.args.y = reinterpret_cast<float*>(pointer(node.y)); }

void Graph::link(NormNode& node) const {
  node.args.x = reinterpret_cast<const float*>(pointer(node.x));
  node.args.x_stride = values_[node.x].columns;
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

void Graph::link(ActivationNode& node) const {
  node.args.x = reinterpret_cast<const float*>(pointer(node.x));
  node.args.y = pointer(node.y);
}

void Graph::link(LoraAddNode& node) const {
  node.args.x = pointer(node.x);
  node.args.x_stride = values_[node.x].columns;
  node.args.y = reinterpret_cast<float*>(pointer(node.y));
  node.args.y_stride = values_[node.y].columns;
}

void Graph::bind(EmbedNode& node, const StepView& step) const {
  node.args.ids = node.by_position ? step.positions : step.token_ids;
  node.args.num_rows = step.num_tokens;
}

void Graph::bind(NormNode& node, const StepView& step) const {
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

void Graph::bind(ActivationNode& node, const StepView& step) const {
  node.args.num_rows = num_rows(node.x, step);
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

void Graph::check_adapters(const StepView& step) const {
  for (int32_t run = 0; run < step.num_adapter_runs; ++run) {
    const int32_t slot = step.adapter_slots[run];
    LMI_CHECK(adapters_ != nullptr && adapters_->has(slot), "the step's adapter slot ", slot,
              " is empty");
  }
}

void Graph::run(const StepView& step, ThreadPool& pool, std::vector<cpu::Scratch>& scratch) {
  LMI_CHECK(finished_, "the graph isn't finished");
  check_adapters(step);
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
