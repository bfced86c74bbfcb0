// The thread that takes submitted steps in order, of every worker that shares it.
//
// Steps run one after the other, so that those of several models never claim the same cores at
// once. Each runs on its worker's team and cores, for which this thread moves there.
#pragma once

#include <sched.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>

#include "graph/graph.h"
#include "graph/step_buffer.h"
#include "graph/team.h"

namespace lmi {

// So many waits for a step in a row that outlasted the spinning end it, until one is short again.
constexpr int kMaxLongWaits = 2;

// The logical cores that a thread may use, of as many as Linux knows.
struct CoreSet {
  std::array<cpu_set_t, 8> cores{};

  // Of the thread that asks.
  static CoreSet current();
  // Has the thread that asks use these. One that may use none of them any more stays where it is.
  void bind() const;
  bool operator==(const CoreSet& other) const;
};

class StepThread {
 public:
  struct Job {
    Graph* graph;
    StepBuffer* step;
    int completion_fd;  // -1: none
    Team* team;
    const CoreSet* cores;
  };

  StepThread();
  // Finishes what is queued.
  ~StepThread();
  StepThread(const StepThread&) = delete;
  StepThread& operator=(const StepThread&) = delete;

  void submit(const Job& job);
  // Waits for the steps that were submitted before.
  void drain();

 private:
  void main();
  void spin_for_job() const;

  std::mutex mutex_;
  std::condition_variable job_added_;
  std::condition_variable job_done_;
  std::deque<Job> jobs_;                // the front one is being executed
  std::atomic<int32_t> num_queued_{0};  // size of jobs_, readable without the mutex
  int64_t num_done_ = 0;                // jobs, so far
  bool is_closing_ = false;
  std::thread thread_;
};

int64_t monotonic_ns();

}  // namespace lmi
