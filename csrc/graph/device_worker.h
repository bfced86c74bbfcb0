// The worker of a CUDA device: one thread launches submitted steps, another waits for their
// results.
//
// Neither runs Python. Steps are launched by a step list of the kernels' library (csrc/cuda), which
// is reached through dlopen, so that nothing here is linked to CUDA.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <thread>

#include "cuda/step_list.h"
#include "graph/device_sampling.h"
#include "graph/rank_group.h"
#include "graph/step_buffer.h"

namespace lmi {

// The step list's functions that the worker calls, see csrc/cuda/step_list.h.
struct StepFunctions {
  decltype(&lmi_cuda_step_list_run) run;
  decltype(&lmi_cuda_step_list_wait) wait;
  decltype(&lmi_cuda_step_list_has_wanted) has_wanted;
  decltype(&lmi_cuda_step_list_capture_wanted) capture_wanted;
  decltype(&lmi_cuda_step_list_state) state;
  decltype(&lmi_cuda_error) error;
};

// Those of a library, which stays open. Throws Error if there is none, or a function is missing.
StepFunctions open_step_functions(const std::string& library);

// All but what is sampled; the step must outlive it.
LmiStep inputs_of(const StepView& step, const int32_t* followed_rows);

class DeviceWorker {
 public:
  // The list has been started, and outlives the worker, as does the group of the ranks of which
  // this one is the first; null: there is one.
  DeviceWorker(const StepFunctions& functions, LmiStepList* list, RankGroup* group = nullptr);
  ~DeviceWorker();
  DeviceWorker(const DeviceWorker&) = delete;
  DeviceWorker& operator=(const DeviceWorker&) = delete;

  // As Worker::submit. A step that follows another one takes its tokens on the device, and those
  // that it counts from that one's results.
  void submit(StepBuffer& step, int completion_fd);

  // Waits until every submitted step is done.
  void drain();

  // Why decode steps are captured no more; "" if they are.
  std::string capture_error() const;

  // Finishes what is queued and joins the threads. Idempotent.
  void close();

 private:
  struct Job {
    StepBuffer* step;
    int completion_fd;
    int32_t slot = -1;  // none: it failed
    int64_t started_ns = 0;
  };

  void launch_all();
  void read_all();
  bool next_job(std::unique_lock<std::mutex>& lock);
  bool capture_wanted();
  bool hand_out(const StepView& step, const int32_t* followed_rows);
  void launch(Job& job);
  static const LmiStepEdits* edits_of_launched(void* self);
  void fail(const Job& job, const std::string& why);
  void read(const Job& job);
  void complete(const Job& job, int64_t& finished_ns);

  const StepFunctions functions_;
  LmiStepList* const list_;
  RankGroup* const group_;
  DeviceSampling sampling_;
  StepBuffer* launching_ = nullptr;
  mutable std::mutex mutex_;
  std::condition_variable submitted_added_;
  std::condition_variable launched_added_;
  std::condition_variable job_done_;
  std::deque<Job> submitted_;
  std::deque<Job> launched_;
  int64_t num_unfinished_ = 0;
  int64_t num_under_way_ = 0;  // launched, and not read
  std::string capture_error_;
  bool is_closing_ = false;
  bool is_launching_done_ = false;
  std::thread launcher_;
  std::thread reader_;
};

}  // namespace lmi
