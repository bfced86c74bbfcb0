#include "common/yielding_thread.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

#include "common/signal_block.h"

namespace lmi {
namespace {

// It runs on where that is refused.
void yield_to_all() {
  constexpr int kIoPriorityOfThread = 1, kIdleClass = 3 << 13;
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), 19);
  syscall(SYS_ioprio_set, kIoPriorityOfThread, 0, kIdleClass);
}

}  // namespace

YieldingThread::YieldingThread(const char* name) {
  const SignalBlock no_signals;
  thread_ = std::thread([this] { main(); });
  pthread_setname_np(thread_.native_handle(), name);
}

YieldingThread::~YieldingThread() { close(); }

void YieldingThread::run(std::function<void()> work) {
  std::unique_lock lock(mutex_);
  work_ = std::move(work);
  changed_.notify_all();
  changed_.wait(lock, [this] { return !work_; });
}

void YieldingThread::close() {
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void YieldingThread::main() {
  yield_to_all();
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return is_closing_ || work_; });
    if (!work_) return;
    lock.unlock();
    work_();
    lock.lock();
    work_ = nullptr;
    changed_.notify_all();
  }
}

}  // namespace lmi
