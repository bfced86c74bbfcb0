// The worker: a thread that takes submitted steps in order and replays their graphs.
//
// It never runs Python. One worker per process and device serves every engine of the process.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "common/aligned_memory.h"
#include "common/thread_pool.h"
#include "graph/graph.h"
#include "graph/step_buffer.h"

namespace lmi {

class Worker {
 public:
  explicit Worker(int32_t num_threads);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  int32_t num_threads() const { return num_threads_; }

  // Queues a step. When it is done 1 is added to the eventfd completion_fd (if >= 0). Graph and
  // step belong to the caller and must live until then. Throws Error after close().
  void submit(Graph& graph, StepBuffer& step, int completion_fd);

  // Waits until every submitted step is done.
  void drain();

  // Finishes what is queued and joins the threads. Idempotent.
  void close();

 private:
  struct Job {
    Graph* graph;
    StepBuffer* step;
    int completion_fd;
  };

  void main();
  void spin_for_job() const;
  void execute(const Job& job, ThreadPool& pool, std::vector<cpu::Scratch>& scratch);

  const int32_t num_threads_;
  std::mutex mutex_;
  std::condition_variable job_added_;
  std::condition_variable job_done_;
  std::deque<Job> jobs_;                // the front one is being executed
  std::atomic<int32_t> num_queued_{0};  // size of jobs_, readable without the mutex
  bool is_closing_ = false;
  std::thread thread_;
};

int64_t monotonic_ns();

}  // namespace lmi
