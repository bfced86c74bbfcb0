#include "kv/pages_ahead.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "common/aligned_memory.h"
#include "common/signal_block.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace lmi {
namespace {

int32_t blocks_ahead(const KvCacheView& view, int32_t num_at_once) {
  const int64_t bytes = std::min(PagesAhead::kBytesAhead, view.total_bytes() / 8);
  const int64_t num_blocks = bytes / (view.num_layers * view.block_bytes());
  return std::max(num_at_once, static_cast<int32_t>(num_blocks));
}

}  // namespace

PagesAhead::PagesAhead(const KvCacheView& view)
    : view_(view),
      num_at_once_(static_cast<int32_t>(std::max<int64_t>(1, kHugePage / view.block_bytes()))),
      num_ahead_(blocks_ahead(view, num_at_once_)) {}

PagesAhead::~PagesAhead() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void PagesAhead::follow(int32_t num_used) {
  // Half of what is ahead may be used up before the thread is asked for more.
  if (num_wanted_ >= std::min(view_.num_blocks, num_used + num_ahead_ / 2 + 1)) return;
  num_wanted_ = std::min(view_.num_blocks, num_used + num_ahead_);
  {
    const std::lock_guard lock(mutex_);
    target_ = num_wanted_;
  }
  if (!thread_.joinable()) {
    const SignalBlock no_signals;
    thread_ = std::thread([this] { run(); });
    pthread_setname_np(thread_.native_handle(), "lmi-kv-pages");
  }
  changed_.notify_one();
}

void PagesAhead::run() {
  int32_t num_laid = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stop_ || num_laid < target_; });
    if (stop_) return;
    lock.unlock();
    const int32_t end = std::min(view_.num_blocks, num_laid + num_at_once_);
    // A kernel that can't (before 5.14), or memory that is full: pages come on use, as ever.
    if (!lay(num_laid, end)) return;
    num_laid = end;
    lock.lock();
  }
}

// Of all layers; false where the kernel refuses. Contents stay what they are.
bool PagesAhead::lay(int32_t first, int32_t end) const {
  const int64_t page_bytes = sysconf(_SC_PAGESIZE);
  for (int32_t layer = 0; layer < view_.num_layers; ++layer) {
    const auto begin = reinterpret_cast<uintptr_t>(view_.key(layer, first, 0));
    const auto past = reinterpret_cast<uintptr_t>(view_.key(layer, end, 0));
    const uintptr_t aligned = begin / page_bytes * page_bytes;
    if (madvise(reinterpret_cast<void*>(aligned), past - aligned, MADV_POPULATE_WRITE) != 0) {
      return false;
    }
  }
  return true;
}

}  // namespace lmi
