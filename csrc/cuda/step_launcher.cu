// Steps of a recorded list: host code only, around the kernels that its nodes launch.
//
// All work is on one stream, so that one place on the device is enough for inputs, activations and
// results; what the host writes and reads has a slot per step under way. A decode step of a
// captured shape is padded to it: its free rows compute token 0 over one key in the scratch block.
#include "cuda/launch.cuh"
#include "cuda/step_launcher.h"
#include "cuda/take_tokens.h"

namespace lmi::cuda {

// ---- a step's inputs

int32_t StepLauncher::upload(const LmiStep& step, const SizedStep& sized, Slot& slot) {
  const StepInputs host(sized.counts, slot.inputs.data());
  if (host.num_bytes > input_bytes_ || !StepPacker::fits(sized)) {
    return fail("a step's inputs take " + std::to_string(host.num_bytes) + " bytes, room is for " +
                std::to_string(input_bytes_) +
                ", or its attention more work than there is room for");
  }
  packer_.fill(step, sized, host);
  return runtime::upload(inputs_, slot.inputs.data(), host.num_bytes, stream_);
}

// ---- launching

int32_t StepLauncher::forward(const StepCounts& counts) {
  const StepInputs inputs(counts, inputs_);
  const StepContext context = context_of(counts, inputs);
  for (const Launch& launch : nodes_) {
    if (const int32_t status = launch(context, stream_)) return status;
  }
  return kOk;
}

// With all rows free, and waits for it. The last step's results stay for the next one.
int32_t StepLauncher::run_empty(StepShape shape) {
  Slot& slot = slots_[next_slot_];
  if (slot.is_busy) return fail("a shape can't be run: its slot is under way");
  const SizedStep sized = packer_.size(LmiStep{}, &shape);
  if (const int32_t status = upload(LmiStep{}, sized, slot)) return status;
  if (const int32_t status = forward(sized.counts)) return settle(status);
  return runtime::synchronize(stream_);
}

// Waits for what was launched before something failed: the slot is free again.
int32_t StepLauncher::settle(int32_t status) {
  const std::string reason = error_text();
  (void)runtime::synchronize(stream_);
  error_text() = reason;
  return status;
}

int32_t StepLauncher::record(StepShape shape, void** graph) {
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

int32_t StepLauncher::capture(StepShape shape) {
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

int32_t StepLauncher::capture(int32_t row_count_id, int32_t key_count_id) {
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

bool StepLauncher::capture_wanted() {
  if (!has_wanted()) return false;
  return capture(captured_.most_wanted()) == kOk;
}

int32_t StepLauncher::warm_up() {
  if (const int32_t status = runtime::use_device(packer_.sizes().device)) return status;
  for (const int32_t num_rows : captured_.row_counts()) {
    for (const int32_t num_keys : captured_.key_counts()) {
      if (const int32_t status = run_empty({num_rows, num_keys})) return status;
    }
  }
  return kOk;
}

int32_t StepLauncher::launch(const LmiStep& step, Slot& slot) {
  StepShape shape;
  void* graph = nullptr;
  if (captured_.find_shape(step, shape)) {
    graph = captured_.find(shape);
    if (graph == nullptr && captured_.miss(shape)) {
      const int32_t status = capture(shape);
      if (status != kOk && ranks_ != nullptr) return status;  // others may replay it
      graph = captured_.find(shape);
    }
  }
  const SizedStep sized = packer_.size(step, graph == nullptr ? nullptr : &shape);
  if (const int32_t status = upload(step, sized, slot)) return status;
  const StepInputs inputs(sized.counts, inputs_);
  if (step.num_copies > 0) {
    const StepContext context = context_of(sized.counts, inputs);
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
      graph == nullptr ? forward(sized.counts) : runtime::launch_graph(graph, stream_);
  if (status != kOk) return status;
  if (graph != nullptr) ++num_replayed_;
  return finish(step, inputs, slot);
}

// What rank 0 chose; the others' next step takes it, too.
int32_t StepLauncher::sample(const LmiStep& step, const StepInputs& inputs, Slot& slot) {
  if (sampler_.is_set()) {
    const int32_t status = sampler_.launch(step, inputs, results_, slot.edits, stream_);
    if (status != kOk) return status;
  }
  if (ranks_ == nullptr) return kOk;
  const LmiShareTokens shared = {ranks_, reinterpret_cast<int32_t*>(results_), slot.num_rows};
  return lmi_cuda_share_tokens(&shared, stream_);
}

// From logits to results on their way to the host.
int32_t StepLauncher::finish(const LmiStep& step, const StepInputs& inputs, Slot& slot) {
  slot.num_rows = step.num_logit_rows;
  slot.max_top = step.sampling.max_top;
  has_results_ = slot.num_rows > 0;
  if (has_results_) {
    int32_t status = sample(step, inputs, slot);
    if (status == kOk && sampler_.is_set()) {
      status = runtime::download(slot.results.data(), results_,
                                 Results::num_bytes(slot.num_rows, slot.max_top), stream_);
    }
    if (status != kOk) return status;
  }
  return runtime::record_event(slot.done, stream_);
}

int32_t StepLauncher::run(const LmiStep& step, int32_t* slot_id) {
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

int32_t StepLauncher::wait(int32_t slot_id, LmiStepResults* results) {
  if (slot_id < 0 || slot_id >= LMI_STEP_SLOTS || !slots_[static_cast<size_t>(slot_id)].is_busy) {
    return fail("slot " + std::to_string(slot_id) + " has no step under way");
  }
  Slot& slot = slots_[static_cast<size_t>(slot_id)];
  int32_t status = runtime::use_device(packer_.sizes().device);
  if (status == kOk) status = runtime::wait_for_event(slot.done);
  const int32_t num_rows = sampler_.is_set() ? slot.num_rows : 0;  // others have rank 0's ids alone
  const Results host(slot.results.data(), num_rows, slot.max_top);
  *results = {host.token_ids, host.logprobs,     host.num_top, host.target_ranks,
              host.top_ids,   host.top_logprobs, num_rows,     slot.max_top};
  slot.is_busy = false;
  return status;
}

}  // namespace lmi::cuda
