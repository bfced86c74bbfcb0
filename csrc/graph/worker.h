// The worker: what executes the steps of one or several models, on so many threads.
//
// It never runs Python. Workers of a process share the thread that takes steps in order
// (step_thread.h), and have helpers and cores of their own.
#pragma once

#include <cstdint>
#include <memory>

#include "graph/step_thread.h"

namespace lmi {

class Worker {
 public:
  // Computes on the cores that the thread may use that makes it. beside: the worker whose steps and
  // this one's run one after the other; null: on a thread of its own.
  explicit Worker(int32_t num_threads, const Worker* beside = nullptr);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  int32_t num_threads() const { return num_threads_; }

  // Queues a step. When it is done 1 is added to the eventfd completion_fd (if >= 0). Graph and
  // step belong to the caller and must live until then. Throws Error after close().
  void submit(Graph& graph, StepBuffer& step, int completion_fd);

  // Waits until every step is done that was submitted before, also of workers beside this one.
  void drain();

  // Finishes what is queued and joins the threads, but for those of others. Idempotent.
  void close();

 private:
  const int32_t num_threads_;
  const CoreSet cores_;
  std::unique_ptr<Team> team_;          // null: closed, as is
  std::shared_ptr<StepThread> thread_;  // ended by the last one that has it
};

}  // namespace lmi
