// The step list: what is recorded, the memory it wants, and its C interface.
#include <utility>

#include "cuda/launch.cuh"
#include "cuda/step_launcher.h"

namespace lmi::cuda {
namespace {

constexpr int64_t kMemoryAlignment = 256;

int64_t align(int64_t num_bytes) { return round_up(num_bytes, kMemoryAlignment); }

}  // namespace

StepLauncher::~StepLauncher() {
  if (stream_ == nullptr) return;
  (void)runtime::use_device(packer_.sizes().device);
  (void)runtime::synchronize(stream_);
  for (const auto& [shape, graph] : captured_.graphs()) runtime::destroy_graph(graph);
  for (const Slot& slot : slots_) {
    if (slot.done != nullptr) runtime::destroy_event(slot.done);
  }
  runtime::destroy_stream(stream_);
}

// ---- recording

int32_t StepLauncher::add_attention(const LmiAttention& args) {
  const AttentionShape shape = {args.num_q_heads, args.num_kv_heads, args.head_dim, args.window};
  if (shape.num_kv_heads < 1 || shape.num_q_heads % shape.num_kv_heads != 0 ||
      shape.num_q_heads / shape.num_kv_heads > max_group(shape.head_dim)) {
    return fail("attention: " + std::to_string(shape.num_q_heads) + " query heads for " +
                std::to_string(shape.num_kv_heads) + " KV heads");
  }
  nodes_.push_back(attention_node(args, packer_.add_attention(shape)));
  return kOk;
}

// For the most rows, and those of captured steps: what is known of steps before there are any.
template <typename Args>
int32_t StepLauncher::prepare(const Args& args, int32_t rows,
                              int32_t (*prepare_rows)(const Args&, int32_t)) {
  const LmiStepSizes& sizes = packer_.sizes();
  if (const int32_t status = runtime::use_device(sizes.device)) return status;
  for (const int32_t num_rows : captured_.row_counts()) {
    if (const int32_t status = prepare_rows(args, num_rows)) return status;
  }
  return prepare_rows(args, rows == LMI_TOKEN_ROWS ? sizes.max_tokens : sizes.max_logit_rows);
}

int32_t StepLauncher::add(int32_t node, int32_t rows, const void* args) {
  if (stream_ != nullptr) return fail("the step list was started: nothing can be added");
  if (rows < LMI_TOKEN_ROWS || rows > LMI_EXPERT_ROWS) {
    return fail("row symbol " + std::to_string(rows) +
                "; known are 0 (tokens), 1 (logits), 2 (experts of tokens)");
  }
  switch (node) {
    case LMI_NODE_COPY_BLOCKS:
      copies_.push_back(step_node(node, rows, args));
      return kOk;
    case LMI_NODE_ATTENTION:
      return add_attention(*static_cast<const LmiAttention*>(args));
    case LMI_NODE_LINEAR:
      nodes_.push_back(step_node(node, rows, args));
      return prepare(*static_cast<const LmiLinearDense*>(args), rows, prepare_linear);
    case LMI_NODE_LINEAR_PACKED:
      nodes_.push_back(step_node(node, rows, args));
      return prepare(*static_cast<const LmiLinearPacked*>(args), rows, prepare_linear_packed);
    case LMI_NODE_LINEAR_QUANTIZED:
      nodes_.push_back(step_node(node, rows, args));
      return prepare(*static_cast<const LmiLinearQuantized*>(args), rows, prepare_linear_quantized);
    case LMI_NODE_LORA_ADD:
      packer_.add_adapters();
      nodes_.push_back(step_node(node, rows, args));
      return kOk;
    case LMI_NODE_SAMPLE:
      sampler_.set(*static_cast<const LmiSample*>(args));
      return kOk;
    case LMI_NODE_SHARE_TOKENS:
      ranks_ = static_cast<const LmiShareTokens*>(args)->ranks;
      return kOk;
    default:
      if (Launch launch = step_node(node, rows, args)) {
        nodes_.push_back(std::move(launch));
        return kOk;
      }
      return fail("node " + std::to_string(node) + " is not known");
  }
}

int64_t StepLauncher::num_bytes() const {
  const LmiStepSizes& sizes = packer_.sizes();
  return align(StepInputs(packer_.most(), nullptr).num_bytes) +
         align(Results::num_bytes(sizes.max_logit_rows, sizes.max_top)) +
         align(4 * packer_.num_partial_values()) + 2 * align(4 * packer_.num_log_masses());
}

int32_t StepLauncher::start(void* memory) {
  if (!sampler_.is_set() && ranks_ == nullptr) {
    return fail("the step list has no sample node, so a step has no result");
  }
  if (stream_ != nullptr) return fail("the step list was started already");
  if (const int32_t status = runtime::use_device(packer_.sizes().device)) return status;
  const LmiStepSizes& sizes = packer_.sizes();
  input_bytes_ = StepInputs(packer_.most(), nullptr).num_bytes;
  const int64_t result_bytes = Results::num_bytes(sizes.max_logit_rows, sizes.max_top);
  inputs_ = static_cast<uint8_t*>(memory);
  results_ = inputs_ + align(input_bytes_);
  partials_ = reinterpret_cast<float*>(results_ + align(result_bytes));
  log_masses_ = partials_ + align(4 * packer_.num_partial_values()) / 4;
  const int64_t arrival_bytes = align(4 * packer_.num_log_masses());
  arrivals_ = reinterpret_cast<int32_t*>(log_masses_ + arrival_bytes / 4);
  if (const int32_t status = runtime::create_stream(&stream_)) return status;
  if (const int32_t status = runtime::clear(arrivals_, arrival_bytes, stream_)) return status;
  for (Slot& slot : slots_) {
    if (const int32_t status = slot.inputs.allocate(input_bytes_)) return status;
    if (const int32_t status = slot.results.allocate(result_bytes)) return status;
    if (const int32_t status = runtime::create_event(&slot.done)) return status;
  }
  return kOk;
}

}  // namespace lmi::cuda

using namespace lmi::cuda;

// ---- the C interface

int32_t lmi_cuda_step_list_create(const LmiStepSizes* sizes, LmiStepList** list) {
  if (sizes->max_tokens < 1 || sizes->max_seqs < 1 || sizes->max_logit_rows < 1 ||
      sizes->block_size < 1 || sizes->max_top < 0 || sizes->max_top > LMI_MAX_TOP) {
    return fail("a step list for " + std::to_string(sizes->max_tokens) + " tokens, " +
                std::to_string(sizes->max_seqs) + " sequences, " +
                std::to_string(sizes->max_logit_rows) + " logit rows, blocks of " +
                std::to_string(sizes->block_size) + " tokens and " +
                std::to_string(sizes->max_top) + " log-probabilities a row can't be had");
  }
  *list = new LmiStepList(*sizes);
  return kOk;
}

void lmi_cuda_step_list_destroy(LmiStepList* list) { delete list; }

int32_t lmi_cuda_step_list_add(LmiStepList* list, int32_t node, int32_t rows, const void* args) {
  return list->add(node, rows, args);
}

int32_t lmi_cuda_step_list_set_adapter(LmiStepList* list, int32_t slot, uint64_t parts) {
  return list->set_adapter(slot, parts);
}

int64_t lmi_cuda_step_list_num_bytes(const LmiStepList* list) { return list->num_bytes(); }

int32_t lmi_cuda_step_list_start(LmiStepList* list, void* memory) { return list->start(memory); }

int32_t lmi_cuda_step_list_run(LmiStepList* list, const LmiStep* step, int32_t* slot) {
  return list->run(*step, slot);
}

int32_t lmi_cuda_step_list_wait(LmiStepList* list, int32_t slot, LmiStepResults* results) {
  return list->wait(slot, results);
}

int32_t lmi_cuda_step_list_capture_wanted(LmiStepList* list) { return list->capture_wanted(); }

int32_t lmi_cuda_step_list_has_wanted(const LmiStepList* list) { return list->has_wanted(); }

int32_t lmi_cuda_step_list_capture(LmiStepList* list, int32_t row_count_id, int32_t key_count_id) {
  return list->capture(row_count_id, key_count_id);
}

int32_t lmi_cuda_step_list_warm_up(LmiStepList* list) { return list->warm_up(); }

void lmi_cuda_step_list_state(LmiStepList* list, LmiStepListState* state) {
  *state = list->state();
}
