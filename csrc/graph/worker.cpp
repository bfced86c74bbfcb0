#include "graph/worker.h"

#include "common/check.h"

namespace lmi {

Worker::Worker(int32_t num_threads, const Worker* beside)
    : num_threads_(num_threads),
      cores_(CoreSet::current()),
      team_(std::make_unique<Team>(num_threads)) {
  LMI_CHECK(beside == nullptr || beside->thread_ != nullptr, "the worker beside is closed");
  thread_ = beside == nullptr ? std::make_shared<StepThread>() : beside->thread_;
}

Worker::~Worker() { close(); }

void Worker::submit(Graph& graph, StepBuffer& step, int completion_fd) {
  LMI_CHECK(thread_ != nullptr, "the worker is closed");
  thread_->submit({&graph, &step, completion_fd, team_.get(), &cores_});
}

void Worker::drain() {
  if (thread_ != nullptr) thread_->drain();
}

void Worker::close() {
  drain();
  thread_.reset();
  team_.reset();
}

}  // namespace lmi
