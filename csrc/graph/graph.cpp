#include "graph/graph.h"

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "cpu/sampling_row.h"
#include "graph/arena.h"

namespace lmi {
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
          LMI_CHECK((kernels_.*n.kKernel).run != nullptr,
                    "an op has no kernel for instruction set ",
                    cpu::instruction_set_name(config_.instruction_set));
        },
        node);
  }
  for (const ValueId id : outputs_) values_[id].last_node = static_cast<int32_t>(nodes_.size());
  fuse_argmax();
  assign_offsets();
  reserve_expert_rows();
  if (cache_) nodes_.insert(nodes_.begin(), BlockCopyNode{{.cache = *cache_}});
  if (attention_workspace_bytes_ > 0) {
    attention_workspace_ = AlignedMemory(attention_workspace_bytes_);
  }
  for (Node& node : nodes_) link(node);
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
    const bool is_whole = args.weight.num_outputs == values_[linear->y].columns;
    if (is_kept || args.bias != nullptr || args.add_to_y || !is_whole) continue;
    linear->feeds_sample = sample->follows_linear = true;
    argmax_candidates_ = std::make_unique<uint64_t[]>(config_.capacity.max_logit_rows);
    wants_argmax_ = std::make_unique<uint8_t[]>(config_.capacity.max_logit_rows);
  }
}

// The layers' mixtures use the same memory, one after the other.
void Graph::reserve_expert_rows() {
  int64_t num_experts = 0, num_rows = 0;
  for (const Node& node : nodes_) {
    const auto* route = std::get_if<RouteNode>(&node);
    if (route == nullptr) continue;
    num_experts = std::max<int64_t>(num_experts, route->args.num_experts);
    num_rows = std::max<int64_t>(num_rows, config_.capacity.max_tokens * route->args.top_k);
  }
  if (num_rows == 0) return;
  const int64_t counts_bytes = round_up(4 * (num_experts + 1), kAlignment),
                rows_bytes = round_up(4 * num_rows, kAlignment);
  expert_memory_ = AlignedMemory(2 * counts_bytes + 2 * rows_bytes + kAlignment);
  uint8_t* memory = expert_memory_.data();
  const auto take = [&memory]<typename T>(T*& field, int64_t num_bytes) {
    field = reinterpret_cast<T*>(memory);
    memory += num_bytes;
  };
  take(expert_rows_.first_rows, counts_bytes);
  take(expert_rows_.active, counts_bytes);
  take(expert_rows_.num_active, kAlignment);
  take(expert_rows_.token_rows, rows_bytes);
  take(expert_rows_.weights, rows_bytes);
}

int64_t Graph::row_capacity(const Value& value) const {
  if (value.rows == RowSymbol::kLogits) return config_.capacity.max_logit_rows;
  return static_cast<int64_t>(config_.capacity.max_tokens) * value.rows_per_token;
}

int64_t Graph::value_bytes(const Value& value) const {
  if (value.memory != ValueMemory::kArena) return 0;
  return round_up(row_capacity(value) * value.columns * dtype_size(value.dtype), kAlignment);
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

uint8_t* Graph::pointer(ValueId id) const {
  const Value& value = values_[id];
  if (value.memory != ValueMemory::kArena) return shared_pointer(value);
  return arena_.data() + value.offset;
}

int64_t Graph::num_rows(ValueId id, const StepView& step) const {
  const Value& value = values_[id];
  if (value.rows == RowSymbol::kLogits) return step.num_logit_rows;
  return static_cast<int64_t>(step.num_tokens) * value.rows_per_token;
}

void Graph::link(Node& node) const {
  const auto set = [this]<typename T>(T*& field, ValueId id) {
    field = reinterpret_cast<T*>(pointer(id));
  };
  std::visit(
      [&](auto& n) {
        auto& args = n.args;
        if constexpr (requires { n.x, args.x; }) set(args.x, n.x);
        if constexpr (requires { n.x, args.x_stride; }) args.x_stride = values_[n.x].columns;
        if constexpr (requires { n.first_input; }) {
          const int64_t offset = n.first_input * dtype_size(values_[n.x].dtype);
          args.x = static_cast<const uint8_t*>(args.x) + offset;
        }
        if constexpr (requires { n.y, args.y; }) set(args.y, n.y);
        if constexpr (requires { n.y, args.y_stride; }) args.y_stride = values_[n.y].columns;
        if constexpr (requires { n.qkv; }) set(args.qkv, n.qkv);
        if constexpr (requires { n.q; }) set(args.q, n.q);
        if constexpr (requires { n.latent; }) {
          if (n.latent >= 0) set(args.latent, n.latent);
        }
        if constexpr (requires { n.logits; }) set(args.logits, n.logits);
        if constexpr (requires { args.experts; }) args.experts = expert_rows_;
        if constexpr (requires { args.workspace; }) args.workspace = attention_workspace_.data();
      },
      node);
  link_sum(node);
  link_slices(node);
  if (auto* linear = std::get_if<LinearNode>(&node)) {
    const int64_t offset = linear->first_column * dtype_size(linear->args.y_dtype);
    linear->args.y = static_cast<uint8_t*>(linear->args.y) + offset;
    linear->args.argmax.candidates = argmax_candidates_.get();
  }
  if (auto* sample = std::get_if<SampleNode>(&node); sample != nullptr && sample->follows_linear) {
    sample->args.argmax = {wants_argmax_.get(), argmax_candidates_.get()};
  }
}

void Graph::bind(Node& node, const StepView& step) const {
  std::visit(
      [&](auto& n) {
        if constexpr (requires { n.args.step; }) n.args.step = &step;
        if constexpr (requires { n.y, n.args.num_rows; }) {
          n.args.num_rows = num_rows(n.y, step);
        } else if constexpr (requires { n.x, n.args.num_rows; }) {
          n.args.num_rows = num_rows(n.x, step);
        }
      },
      node);
  if (auto* kept = std::get_if<KeepRowsNode>(&node)) {
    bind_kept(*kept, step);
  } else if (auto* embed = std::get_if<EmbedNode>(&node)) {
    embed->args.ids = step.*embed->ids;
  } else if (auto* gather = std::get_if<GatherNode>(&node)) {
    const bool is_by_expert = values_[gather->y].rows == RowSymbol::kExperts;
    gather->args.rows = is_by_expert ? expert_rows_.token_rows : step.logit_token_rows;
  } else if (auto* linear = std::get_if<LinearNode>(&node);
             linear != nullptr && linear->feeds_sample) {
    const int64_t num_marked = cpu::mark_argmax_rows(step, wants_argmax_.get());
    linear->args.argmax.is_wanted = num_marked > 0 ? wants_argmax_.get() : nullptr;
    std::fill_n(argmax_candidates_.get(), step.num_logit_rows, 0);
  }
}

// The node's chunks for this step.
int64_t Graph::start_node(int32_t node_id, const StepView& step, int32_t num_threads) {
  wait_for_ranks(nodes_[node_id]);
  bind(nodes_[node_id], step);
  return std::visit(
      [&](const auto& n) { return (kernels_.*n.kKernel).num_chunks(n.args, num_threads); },
      nodes_[node_id]);
}

void Graph::run_chunk(int32_t node_id, int64_t chunk, int32_t num_threads,
                      cpu::Scratch& scratch) const {
  std::visit([&](const auto& n) { (kernels_.*n.kKernel).run(n.args, chunk, num_threads, scratch); },
             nodes_[node_id]);
}

void Graph::check_adapters(const StepView& step) const {
  for (int32_t run = 0; run < step.num_adapter_runs; ++run) {
    const int32_t slot = step.adapter_slots[run];
    LMI_CHECK(adapters_ != nullptr && adapters_->has(slot), "the step's adapter slot ", slot,
              " is empty");
  }
}

void Graph::watch(std::shared_ptr<const MappedFile> file) {
  if (std::find(files_.begin(), files_.end(), file) == files_.end()) {
    files_.push_back(std::move(file));
  }
}

void Graph::check_files() const {
  for (const auto& file : files_) {
    if (file->is_lost()) {
      throw LostFileError("the model's file " + file->path() +
                          " was truncated while it was in use; load the model again");
    }
  }
}

void Graph::run(const StepView& step, ThreadPool& pool, std::vector<cpu::Scratch>& scratch) {
  LMI_CHECK(finished_, "the graph isn't finished");
  check_files();
  check_adapters(step);
  begin_step(step);
  run_nodes(step, pool, scratch);
  check_ranks();
  check_files();
}

void Graph::run_nodes(const StepView& step, ThreadPool& pool, std::vector<cpu::Scratch>& scratch) {
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
