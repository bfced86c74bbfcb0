// The step list: host code only, around the kernels that its nodes launch.
//
// All work is on one stream, so that one place on the device is enough for inputs, activations and
// results; what the host writes and reads has a slot per step under way. A decode step of a
// captured shape is padded to it: its free rows compute token 0 over one key in the scratch block.
#include <array>
#include <atomic>

#include "cuda/launch.cuh"
#include "cuda/step_nodes.h"
#include "cuda/step_packer.h"
#include "cuda/step_sampler.h"
#include "cuda/take_tokens.h"

namespace lmi::cuda {
namespace {

constexpr int64_t kMemoryAlignment = 256;

int64_t align(int64_t num_bytes) { return round_up(num_bytes, kMemoryAlignment); }

// What the host needs of a step until somebody has waited for it.
struct Slot {
  std::atomic<bool> is_busy{false};
  PinnedMemory inputs;
  PinnedMemory results;
  GrowingUpload edits;
  void* done = nullptr;
  int32_t num_rows = 0;
  int32_t max_top = 0;
};

}  // namespace
}  // namespace lmi::cuda

using namespace lmi::cuda;

struct LmiStepList {
 public:
  explicit LmiStepList(const LmiStepSizes& sizes) : packer_(sizes), captured_(sizes) {}
  LmiStepList(const LmiStepList&) = delete;
  LmiStepList& operator=(const LmiStepList&) = delete;
  ~LmiStepList();

  int32_t add(int32_t node, int32_t rows, const void* args);
  int64_t num_bytes() const;
  int32_t start(void* memory);
  int32_t run(const LmiStep& step, int32_t* slot_id);
  int32_t wait(int32_t slot_id, LmiStepResults* results);
  bool has_wanted() const { return captured_.has_wanted(); }
  bool capture_wanted();
  int32_t capture(StepShape shape);
  int32_t capture(int32_t row_count_id, int32_t key_count_id);
  int32_t warm_up();
  LmiStepListState state() const {
    return {captured_.num_captured(), num_replayed_, captured_.error()};
  }

 private:
  int32_t add_attention(const LmiAttention& args);
  int32_t upload(const LmiStep& step, const PlannedStep& planned, Slot& slot);
  int32_t forward(const StepCounts& counts);
  int32_t run_empty(StepShape shape);
  int32_t settle(int32_t status);
  int32_t record(StepShape shape, void** graph);
  int32_t launch(const LmiStep& step, Slot& slot);
  StepContext context_of(const StepCounts& counts, const StepInputs& inputs) const {
    return {counts, inputs, packer_.sizes().block_size, partials_, log_masses_};
  }
  int32_t finish(const LmiStep& step, const StepInputs& inputs, Slot& slot);

  StepPacker packer_;
  CapturedSteps captured_;
  std::vector<Launch> copies_;
  std::vector<Launch> nodes_;
  StepSampler sampler_;

  void* stream_ = nullptr;
  std::array<Slot, LMI_STEP_SLOTS> slots_;
  size_t next_slot_ = 0;
  int64_t input_bytes_ = 0;
  uint8_t* inputs_ = nullptr;  // on the device, as the following
  uint8_t* results_ = nullptr;
  float* partials_ = nullptr;
  float* log_masses_ = nullptr;
  bool has_results_ = false;  // whether the last step's are there
  std::atomic<int64_t> num_replayed_{0};
};

LmiStepList::~LmiStepList() {
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

int32_t LmiStepList::add_attention(const LmiAttention& args) {
  const AttentionShape shape = {args.num_q_heads, args.num_kv_heads, args.head_dim, args.window};
  if (shape.num_kv_heads < 1 || shape.num_q_heads % shape.num_kv_heads != 0 ||
      shape.num_q_heads / shape.num_kv_heads > kMaxGroup) {
    return fail("attention: " + std::to_string(shape.num_q_heads) + " query heads for " +
                std::to_string(shape.num_kv_heads) + " KV heads");
  }
  nodes_.push_back(attention_node(args, packer_.add_attention(shape)));
  return kOk;
}

int32_t LmiStepList::add(int32_t node, int32_t rows, const void* args) {
  if (stream_ != nullptr) return fail("the step list was started: nothing can be added");
  if (rows != LMI_TOKEN_ROWS && rows != LMI_LOGIT_ROWS) {
    return fail("row symbol " + std::to_string(rows) + "; known are 0 (tokens), 1 (logits)");
  }
  switch (node) {
    case LMI_NODE_COPY_BLOCKS:
      copies_.push_back(copy_blocks_node(*static_cast<const LmiCopyBlocks*>(args)));
      return kOk;
    case LMI_NODE_EMBED:
      nodes_.push_back(embed_node(*static_cast<const LmiGatherRows*>(args)));
      return kOk;
    case LMI_NODE_GATHER_LOGIT_ROWS:
      nodes_.push_back(gather_logit_rows_node(*static_cast<const LmiGatherRows*>(args)));
      return kOk;
    case LMI_NODE_RMS_NORM:
      nodes_.push_back(row_node(*static_cast<const LmiRmsNorm*>(args), rows, lmi_cuda_rms_norm));
      return kOk;
    case LMI_NODE_GATED_ACTIVATION:
      nodes_.push_back(
          row_node(*static_cast<const LmiGatedActivation*>(args), rows, lmi_cuda_gated_activation));
      return kOk;
    case LMI_NODE_ROPE_CACHE_WRITE:
      nodes_.push_back(rope_cache_write_node(*static_cast<const LmiRopeCacheWrite*>(args)));
      return kOk;
    case LMI_NODE_ATTENTION:
      return add_attention(*static_cast<const LmiAttention*>(args));
    case LMI_NODE_LINEAR:
      nodes_.push_back(linear_node(*static_cast<const LmiLinearDense*>(args), rows));
      return kOk;
    case LMI_NODE_LINEAR_PACKED:
      nodes_.push_back(
          row_node(*static_cast<const LmiLinearPacked*>(args), rows, lmi_cuda_linear_packed));
      return kOk;
    case LMI_NODE_QUANTIZE_ROWS:
      nodes_.push_back(
          row_node(*static_cast<const LmiQuantizeRows*>(args), rows, lmi_cuda_quantize_rows));
      return kOk;
    case LMI_NODE_LINEAR_QUANTIZED:
      nodes_.push_back(
          row_node(*static_cast<const LmiLinearQuantized*>(args), rows, lmi_cuda_linear_quantized));
      return kOk;
    case LMI_NODE_SAMPLE:
      sampler_.set(*static_cast<const LmiSample*>(args));
      return kOk;
    default:
      return fail("node " + std::to_string(node) + " is not known");
  }
}

int64_t LmiStepList::num_bytes() const {
  const LmiStepSizes& sizes = packer_.sizes();
  return align(StepInputs(packer_.most(), nullptr).num_bytes) +
         align(Results::num_bytes(sizes.max_logit_rows, sizes.max_top)) +
         align(4 * packer_.num_partial_values()) + align(4 * packer_.num_log_masses());
}

int32_t LmiStepList::start(void* memory) {
  if (!sampler_.is_set()) return fail("the step list has no sample node, so a step has no result");
  if (stream_ != nullptr) return fail("the step list was started already");
  if (const int32_t status = runtime::use_device(packer_.sizes().device)) return status;
  const LmiStepSizes& sizes = packer_.sizes();
  input_bytes_ = StepInputs(packer_.most(), nullptr).num_bytes;
  const int64_t result_bytes = Results::num_bytes(sizes.max_logit_rows, sizes.max_top);
  inputs_ = static_cast<uint8_t*>(memory);
  results_ = inputs_ + align(input_bytes_);
  partials_ = reinterpret_cast<float*>(results_ + align(result_bytes));
  log_masses_ = partials_ + align(4 * packer_.num_partial_values()) / 4;
  if (const int32_t status = runtime::create_stream(&stream_)) return status;
  for (Slot& slot : slots_) {
    if (const int32_t status = slot.inputs.allocate(input_bytes_)) return status;
    if (const int32_t status = slot.results.allocate(result_bytes)) return status;
    if (const int32_t status = runtime::create_event(&slot.done)) return status;
  }
  return kOk;
}

// ---- a step's inputs

int32_t LmiStepList::upload(const LmiStep& step, const PlannedStep& planned, Slot& slot) {
  const StepInputs host(planned.counts, slot.inputs.data());
  if (host.num_bytes > input_bytes_ || !StepPacker::fits(planned)) {
    return fail("a step's inputs take " + std::to_string(host.num_bytes) + " bytes, room is for " +
                std::to_string(input_bytes_) + ", or its attention more work than was planned for");
  }
  packer_.fill(step, planned, host);
  return runtime::upload(inputs_, slot.inputs.data(), host.num_bytes, stream_);
}

// ---- launching

int32_t LmiStepList::forward(const StepCounts& counts) {
  const StepInputs inputs(counts, inputs_);
  const StepContext context = context_of(counts, inputs);
  for (const Launch& launch : nodes_) {
    if (const int32_t status = launch(context, stream_)) return status;
  }
  return kOk;
}

// With all rows free, and waits for it. The last step's results stay for the next one.
int32_t LmiStepList::run_empty(StepShape shape) {
  Slot& slot = slots_[next_slot_];
  if (slot.is_busy) return fail("a shape can't be run: its slot is under way");
  const PlannedStep planned = packer_.plan(LmiStep{}, &shape);
  if (const int32_t status = upload(LmiStep{}, planned, slot)) return status;
  if (const int32_t status = forward(planned.counts)) return settle(status);
  return runtime::synchronize(stream_);
}

// Waits for what was launched before something failed: the slot is free again.
int32_t LmiStepList::settle(int32_t status) {
  const std::string reason = error_text();
  (void)runtime::synchronize(stream_);
  error_text() = reason;
  return status;
}

int32_t LmiStepList::record(StepShape shape, void** graph) {
  if (const int32_t status = run_empty(shape)) return status;
  if (const int32_t status = runtime::begin_capture(stream_)) return status;
  const int32_t status = forward(packer_.counts_of(shape));
  const std::string reason = error_text();
  const int32_t ended = runtime::end_capture(stream_, graph);
  if (status == kOk) return ended;
  if (*graph != nullptr) runtime::destroy_graph(*graph);
  error_text() = reason;
  return status;
}

int32_t LmiStepList::capture(StepShape shape) {
  if (const int32_t status = runtime::use_device(packer_.sizes().device)) return status;
  void* graph = nullptr;
  if (const int32_t status = record(shape, &graph)) {
    captured_.give_up(error_text());
    return status;
  }
  void* before = captured_.put(shape, graph);
  if (before != nullptr) runtime::destroy_graph(before);
  return kOk;
}

int32_t LmiStepList::capture(int32_t row_count_id, int32_t key_count_id) {
  const auto is_in = [](int32_t id, const std::vector<int32_t>& counts) {
    return id >= 0 && static_cast<size_t>(id) < counts.size();
  };
  if (!is_in(row_count_id, captured_.row_counts()) ||
      !is_in(key_count_id, captured_.key_counts())) {
    return fail("no shape has row count " + std::to_string(row_count_id) + " and key count " +
                std::to_string(key_count_id));
  }
  return capture(captured_.shape(row_count_id, key_count_id));
}

bool LmiStepList::capture_wanted() {
  if (!has_wanted() || slots_[next_slot_].is_busy) return false;
  return capture(captured_.most_wanted()) == kOk;
}

int32_t LmiStepList::warm_up() {
  if (const int32_t status = runtime::use_device(packer_.sizes().device)) return status;
  for (const int32_t num_rows : captured_.row_counts()) {
    for (const int32_t num_keys : captured_.key_counts()) {
      if (const int32_t status = run_empty({num_rows, num_keys})) return status;
    }
  }
  return kOk;
}

int32_t LmiStepList::launch(const LmiStep& step, Slot& slot) {
  StepShape shape;
  void* graph = nullptr;
  if (captured_.find_shape(step, shape)) {
    graph = captured_.find(shape);
    if (graph == nullptr && captured_.miss(shape) && capture(shape) == kOk) {
      graph = captured_.find(shape);
    }
  }
  const PlannedStep planned = packer_.plan(step, graph == nullptr ? nullptr : &shape);
  if (const int32_t status = upload(step, planned, slot)) return status;
  const StepInputs inputs(planned.counts, inputs_);
  if (step.num_copies > 0) {
    const StepContext context = context_of(planned.counts, inputs);
    for (const Launch& copy : copies_) {
      if (const int32_t status = copy(context, stream_)) return status;
    }
  }
  if (step.followed_rows != nullptr && has_results_) {
    const TakeTokens args = {reinterpret_cast<const int32_t*>(results_), inputs.followed_rows,
                             inputs.token_ids, step.num_tokens};
    if (const int32_t status = take_tokens(args, stream_)) return status;
  }
  const int32_t status =
      graph == nullptr ? forward(planned.counts) : runtime::launch_graph(graph, stream_);
  if (status != kOk) return status;
  if (graph != nullptr) ++num_replayed_;
  return finish(step, inputs, slot);
}

// From logits to results on their way to the host.
int32_t LmiStepList::finish(const LmiStep& step, const StepInputs& inputs, Slot& slot) {
  slot.num_rows = step.num_logit_rows;
  slot.max_top = step.sampling.max_top;
  has_results_ = slot.num_rows > 0;
  if (has_results_) {
    int32_t status = sampler_.launch(step, inputs, results_, slot.edits, stream_);
    if (status == kOk) {
      status = runtime::download(slot.results.data(), results_,
                                 Results::num_bytes(slot.num_rows, slot.max_top), stream_);
    }
    if (status != kOk) return status;
  }
  return runtime::record_event(slot.done, stream_);
}

int32_t LmiStepList::run(const LmiStep& step, int32_t* slot_id) {
  if (stream_ == nullptr) return fail("the step list was not started");
  if (const int32_t status = runtime::use_device(packer_.sizes().device)) return status;
  if (const int32_t status = packer_.check(step)) return status;
  Slot& slot = slots_[next_slot_];
  if (slot.is_busy) {
    return fail("more than " + std::to_string(LMI_STEP_SLOTS) + " steps are under way");
  }
  if (const int32_t status = launch(step, slot)) {
    has_results_ = false;
    return settle(status);
  }
  slot.is_busy = true;
  *slot_id = static_cast<int32_t>(next_slot_);
  next_slot_ = (next_slot_ + 1) % slots_.size();
  return kOk;
}

int32_t LmiStepList::wait(int32_t slot_id, LmiStepResults* results) {
  if (slot_id < 0 || slot_id >= LMI_STEP_SLOTS || !slots_[static_cast<size_t>(slot_id)].is_busy) {
    return fail("slot " + std::to_string(slot_id) + " has no step under way");
  }
  Slot& slot = slots_[static_cast<size_t>(slot_id)];
  int32_t status = runtime::use_device(packer_.sizes().device);
  if (status == kOk) status = runtime::wait_for_event(slot.done);
  const Results host(slot.results.data(), slot.num_rows, slot.max_top);
  *results = {host.token_ids,    host.logprobs, host.num_top, host.top_ids,
              host.top_logprobs, slot.num_rows, slot.max_top};
  slot.is_busy = false;
  return status;
}

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
