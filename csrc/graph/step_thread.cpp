#include "graph/step_thread.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <exception>

#include "common/check.h"
#include "common/signal_block.h"
#include "common/spin.h"

namespace lmi {
namespace {

constexpr int64_t kSpinNs = 150'000;

void execute(const StepThread::Job& job) {
  job.step->times.started_ns = monotonic_ns();
  try {
    job.step->take_tokens();
    job.graph->run(job.step->view(), job.team->pool, job.team->scratch);
  } catch (const FinalError& error) {
    job.step->error = error.what();
    job.step->is_final = true;
  } catch (const std::exception& error) {
    job.step->error = error.what();
  }
  job.step->times.finished_ns = monotonic_ns();
  if (job.completion_fd < 0) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(job.completion_fd, &one, sizeof(one));
}

}  // namespace

int64_t monotonic_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

CoreSet CoreSet::current() {
  CoreSet set;
  sched_getaffinity(0, sizeof(set.cores), set.cores.data());
  return set;
}

void CoreSet::bind() const { sched_setaffinity(0, sizeof(cores), cores.data()); }

bool CoreSet::operator==(const CoreSet& other) const {
  return std::memcmp(&cores, &other.cores, sizeof(cores)) == 0;
}

StepThread::StepThread() {
  const SignalBlock no_signals;
  thread_ = std::thread([this] { main(); });
}

StepThread::~StepThread() {
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  job_added_.notify_one();
  thread_.join();
}

void StepThread::submit(const Job& job) {
  job.step->times.submitted_ns = monotonic_ns();
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(job);
    num_queued_.store(static_cast<int32_t>(jobs_.size()), std::memory_order_release);
  }
  job_added_.notify_one();
}

void StepThread::drain() {
  std::unique_lock lock(mutex_);
  const int64_t num_before = num_done_ + static_cast<int64_t>(jobs_.size());
  job_done_.wait(lock, [&] { return num_done_ >= num_before; });
}

void StepThread::main() {
  pthread_setname_np(pthread_self(), "lmi-worker");
  CoreSet cores = CoreSet::current();
  int num_long_waits = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    const int64_t idle_since_ns = monotonic_ns();
    if (jobs_.empty() && !is_closing_ && num_long_waits < kMaxLongWaits) {
      lock.unlock();
      spin_for_job();
      lock.lock();
    }
    job_added_.wait(lock, [this] { return is_closing_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    const Job job = jobs_.front();
    const bool is_long_wait = job.step->times.submitted_ns - idle_since_ns > kSpinNs;
    num_long_waits = is_long_wait ? std::min(num_long_waits + 1, kMaxLongWaits) : 0;
    lock.unlock();
    if (!(*job.cores == cores)) {
      cores = *job.cores;
      cores.bind();
    }
    execute(job);
    lock.lock();
    jobs_.pop_front();
    ++num_done_;
    num_queued_.store(static_cast<int32_t>(jobs_.size()), std::memory_order_release);
    job_done_.notify_all();
  }
}

// A loop that generates for a few submits its next step within this time; waking a sleeping thread
// would cost about as much. With many to serve it takes longer, and needs the cores meanwhile.
// Idle, this is spent once.
void StepThread::spin_for_job() const {
  const int64_t end_ns = monotonic_ns() + kSpinNs;
  while (num_queued_.load(std::memory_order_acquire) == 0 && monotonic_ns() < end_ns) cpu_pause();
}

}  // namespace lmi
