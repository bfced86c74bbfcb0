#include "graph/device_worker.h"

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "common/check.h"
#include "common/signal_block.h"
#include "graph/step_thread.h"

namespace lmi {
namespace {

constexpr std::chrono::milliseconds kIdle{50};  // without a step for so long, decodes are captured

template <typename Function>
void find(void* library, const char* name, Function& function) {
  void* symbol = dlsym(library, name);
  LMI_CHECK(symbol != nullptr, "the CUDA kernels' library has no ", name);
  function = reinterpret_cast<Function>(symbol);
}

void write_results(const LmiStepResults& results, const StepView& step) {
  std::copy_n(results.token_ids, results.num_rows, step.sampled_ids);
  std::copy_n(results.logprobs, results.num_rows, step.sampled_logprobs);
  std::copy_n(results.num_top, results.num_rows, step.num_top);
  std::copy_n(results.target_ranks, results.num_rows, step.target_ranks);
  for (int64_t row = 0; row < results.num_rows; ++row) {
    const int64_t source = row * results.max_top;
    const int64_t target = row * step.capacity.max_logprobs;
    std::copy_n(results.top_ids + source, results.num_top[row], step.top_ids + target);
    std::copy_n(results.top_logprobs + source, results.num_top[row], step.top_logprobs + target);
  }
}

}  // namespace

LmiStep inputs_of(const StepView& view, const int32_t* followed_rows) {
  LmiStep inputs = {};
  inputs.token_ids = view.token_ids;
  inputs.positions = view.positions;
  inputs.slots = view.slots;
  inputs.first_rows = view.first_rows;
  inputs.num_rows = view.num_rows;
  inputs.kv_lengths = view.kv_lengths;
  inputs.table_rows = view.table_rows;
  inputs.block_tables = view.block_tables;
  inputs.logit_token_rows = view.logit_token_rows;
  inputs.copy_src = view.copy_src;
  inputs.copy_dst = view.copy_dst;
  inputs.adapter_first_rows = view.adapter_first_rows;
  inputs.adapter_num_rows = view.adapter_num_rows;
  inputs.adapter_slots = view.adapter_slots;
  inputs.followed_rows = followed_rows;
  inputs.num_tokens = view.num_tokens;
  inputs.num_seqs = view.num_seqs;
  inputs.num_logit_rows = view.num_logit_rows;
  inputs.num_copies = view.num_copies;
  inputs.num_adapter_runs = view.num_adapter_runs;
  inputs.table_stride = view.capacity.max_blocks_per_seq;
  return inputs;
}

StepFunctions open_step_functions(const std::string& library) {
  void* opened = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  LMI_CHECK(opened != nullptr, dlerror());
  StepFunctions functions;
  find(opened, "lmi_cuda_step_list_run", functions.run);
  find(opened, "lmi_cuda_step_list_wait", functions.wait);
  find(opened, "lmi_cuda_step_list_has_wanted", functions.has_wanted);
  find(opened, "lmi_cuda_step_list_capture_wanted", functions.capture_wanted);
  find(opened, "lmi_cuda_step_list_state", functions.state);
  find(opened, "lmi_cuda_error", functions.error);
  return functions;
}

DeviceWorker::DeviceWorker(const StepFunctions& functions, LmiStepList* list, RankGroup* group)
    : functions_(functions), list_(list), group_(group) {
  const SignalBlock no_signals;
  launcher_ = std::thread([this] { launch_all(); });
  reader_ = std::thread([this] { read_all(); });
}

DeviceWorker::~DeviceWorker() { close(); }

void DeviceWorker::submit(StepBuffer& step, int completion_fd) {
  step.times.submitted_ns = monotonic_ns();
  {
    const std::lock_guard lock(mutex_);
    LMI_CHECK(!is_closing_, "the worker is closed");
    submitted_.push_back({&step, completion_fd});
    ++num_unfinished_;
  }
  submitted_added_.notify_one();
}

void DeviceWorker::drain() {
  std::unique_lock lock(mutex_);
  job_done_.wait(lock, [this] { return num_unfinished_ == 0; });
}

std::string DeviceWorker::capture_error() const {
  const std::lock_guard lock(mutex_);
  return capture_error_;
}

void DeviceWorker::close() {
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  submitted_added_.notify_one();
  for (std::thread* thread : {&launcher_, &reader_}) {
    if (thread->joinable()) thread->join();
  }
}

// ---- the launcher's thread

// Waits for a step and captures decodes meanwhile; false if there will be none.
bool DeviceWorker::next_job(std::unique_lock<std::mutex>& lock) {
  const auto has_news = [this] { return is_closing_ || !submitted_.empty(); };
  while (functions_.has_wanted(list_) != 0 && !submitted_added_.wait_for(lock, kIdle, has_news)) {
    lock.unlock();
    const bool has_captured = capture_wanted();
    lock.lock();
    if (!has_captured) break;
  }
  submitted_added_.wait(lock, has_news);
  return !submitted_.empty();
}

void DeviceWorker::launch_all() {
  pthread_setname_np(pthread_self(), "lmi-launcher");
  std::unique_lock lock(mutex_);
  while (next_job(lock)) {
    Job job = submitted_.front();
    submitted_.pop_front();
    lock.unlock();
    launch(job);
    LmiStepListState state = {};
    functions_.state(list_, &state);
    lock.lock();
    if (capture_error_.empty()) capture_error_ = state.capture_error;
    launched_.push_back(job);
    ++num_under_way_;
    launched_added_.notify_one();
  }
  is_launching_done_ = true;
  launched_added_.notify_one();
}

// All ranks do; one that can't would replay other sums than the others.
bool DeviceWorker::capture_wanted() {
  if (group_ != nullptr && !hand_out({}, nullptr)) return false;
  const bool has_captured = functions_.capture_wanted(list_) != 0;
  if (!has_captured && group_ != nullptr) group_->lose(functions_.error());
  return has_captured;
}

// A step without rows stands for a capture. False: nobody launches it, so this rank mustn't.
bool DeviceWorker::hand_out(const StepView& step, const int32_t* followed_rows) {
  group_->meet(true);  // the others have read the last one
  group_->publish(step, followed_rows);
  return !group_->is_lost();
}

void DeviceWorker::launch(Job& job) {
  job.started_ns = monotonic_ns();
  try {
    const StepView& step = job.step->view();
    LmiStep inputs = inputs_of(step, job.step->followed_rows());
    inputs.sampling = sampling_.gather_rows(step);
    inputs.sampling.edits = &edits_of_launched;
    inputs.sampling.context = this;
    launching_ = job.step;
    if (group_ != nullptr && !hand_out(step, inputs.followed_rows)) {
      fail(job, group_->reason());
    } else if (functions_.run(list_, &inputs, &job.slot) == 0) {
      return;
    } else {
      fail(job, functions_.error());
    }
  } catch (const std::exception& error) {
    fail(job, error.what());
  }
  job.slot = -1;
}

// Behind the forward pass, so that this needn't wait for what penalties and grammars do.
const LmiStepEdits* DeviceWorker::edits_of_launched(void* self) {
  auto& worker = *static_cast<DeviceWorker*>(self);
  StepBuffer& step = *worker.launching_;
  if (!step.counted_rows().empty()) {
    std::unique_lock lock(worker.mutex_);
    worker.job_done_.wait(lock, [&worker] { return worker.num_under_way_ == 0; });
    lock.unlock();
    step.take_tokens();
  }
  return worker.sampling_.gather_edits(step.view());
}

// Ranks go on together or not at all; the reason is the first one's.
void DeviceWorker::fail(const Job& job, const std::string& why) {
  job.step->error = why;
  if (group_ == nullptr) return;
  group_->lose(why);
  job.step->error = group_->reason();
  job.step->is_final = true;
}

// ---- the reader's thread

void DeviceWorker::read_all() {
  pthread_setname_np(pthread_self(), "lmi-reader");
  int64_t finished_ns = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    launched_added_.wait(lock, [this] { return is_launching_done_ || !launched_.empty(); });
    if (launched_.empty()) return;
    const Job job = launched_.front();
    launched_.pop_front();
    lock.unlock();
    if (job.slot >= 0) read(job);
    complete(job, finished_ns);
    lock.lock();
    --num_unfinished_;
    --num_under_way_;
    job_done_.notify_all();
  }
}

void DeviceWorker::read(const Job& job) {
  LmiStepResults results = {};
  if (functions_.wait(list_, job.slot, &results) != 0) {
    fail(job, functions_.error());
  } else if (group_ != nullptr && group_->is_lost()) {
    fail(job, group_->reason());
  } else {
    write_results(results, job.step->view());
  }
}

// A step began when the one before had ended, however early it was launched.
void DeviceWorker::complete(const Job& job, int64_t& finished_ns) {
  job.step->times.started_ns = std::max(job.started_ns, finished_ns);
  job.step->times.finished_ns = finished_ns = monotonic_ns();
  if (job.completion_fd < 0) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(job.completion_fd, &one, sizeof(one));
}

}  // namespace lmi
