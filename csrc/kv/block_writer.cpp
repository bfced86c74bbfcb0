#include "kv/block_writer.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "common/check.h"
#include "common/signal_block.h"
#include "kv/block_file.h"

namespace lmi {
namespace {

// This thread's processor and drive are everybody else's first. It runs on where that is refused.
void yield_to_all() {
  constexpr int kIoPriorityOfThread = 1, kIdleClass = 3 << 13;
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), 19);
  syscall(SYS_ioprio_set, kIoPriorityOfThread, 0, kIdleClass);
}

}  // namespace

BlockWriter::BlockWriter(BlockPool& pool, std::string directory, const HashKey& key,
                         int64_t block_bytes)
    : pool_(pool),
      directory_(std::move(directory)),
      key_(key),
      block_bytes_(block_bytes),
      file_(block_file_bytes(block_bytes), true) {
  const SignalBlock no_signals;
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "lmi-kv-files");
  pool_.on_evict([this](int32_t block_id, bool is_last) { return evicted(block_id, is_last); });
}

BlockWriter::~BlockWriter() { close(0); }

void BlockWriter::write(std::string name, const KvCacheView& view, int32_t block_id) {
  LMI_CHECK(block_id >= 0 && block_id < view.num_blocks, "block ", block_id, " of ",
            view.num_blocks);
  LMI_CHECK(view.num_layers * view.block_bytes() == block_bytes_, "a block has ", block_bytes_,
            " bytes, not ", view.num_layers * view.block_bytes());
  add({std::move(name), view, block_id, {}});
}

void BlockWriter::write(std::string name, std::vector<uint8_t> content) {
  LMI_CHECK(static_cast<int64_t>(content.size()) == block_bytes_, "a block has ", block_bytes_,
            " bytes, not ", content.size());
  add({std::move(name), {}, -1, std::move(content)});
}

void BlockWriter::remove(std::string name) { add({std::move(name), {}, -1, {}}); }

void BlockWriter::give_up(std::string name) {
  const std::lock_guard lock(mutex_);
  end(std::move(name), ECANCELED);
}

void BlockWriter::add(Task task) {
  {
    const std::lock_guard lock(mutex_);
    if (stop_) return end(std::move(task.name), ECANCELED);
    num_uncopied_ += task.block_id >= 0;
    tasks_.push_back(std::move(task));
  }
  changed_.notify_all();
}

std::vector<BlockWriter::Outcome> BlockWriter::take_outcomes() {
  const std::lock_guard lock(mutex_);
  return std::exchange(outcomes_, {});
}

bool BlockWriter::evicted(int32_t block_id, bool is_last) {
  if (num_uncopied_ == 0) return true;
  std::unique_lock lock(mutex_);
  const auto waiting = std::find_if(tasks_.begin(), tasks_.end(), [block_id](const Task& task) {
    return task.block_id == block_id;
  });
  if (waiting != tasks_.end()) {
    end(std::move(waiting->name), ECANCELED);
    tasks_.erase(waiting);
    --num_uncopied_;
    return true;
  }
  if (copied_id_ != block_id) return true;
  if (!is_last) return false;
  is_given_up_ = true;
  changed_.wait(lock, [&] { return copied_id_ != block_id; });
  return true;
}

void BlockWriter::close(double timeout_s) {
  if (!thread_.joinable()) return;
  {
    std::unique_lock lock(mutex_);
    stop_ = true;
    changed_.notify_all();
    changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return has_ended_; });
    for (Task& task : tasks_) end(std::move(task.name), ECANCELED);
    tasks_.clear();
  }
  thread_.join();
  pool_.on_evict({});
}

void BlockWriter::run() {
  yield_to_all();
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stop_ || !tasks_.empty(); });
    if (tasks_.empty()) break;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    copied_id_ = task.block_id;
    is_given_up_ = false;
    lock.unlock();
    const int error = store(task);
    lock.lock();
    const bool is_removal = task.block_id < 0 && task.content.empty();
    if (!is_removal) end(std::move(task.name), error);
  }
  has_ended_ = true;
  changed_.notify_all();
}

int BlockWriter::store(const Task& task) {
  const std::string path = directory_ + '/' + task.name;
  if (task.block_id >= 0) {
    if (!copy(task)) return ECANCELED;
  } else if (task.content.empty()) {
    return ::unlink(path.c_str()) == 0 ? 0 : errno;
  } else {
    std::memcpy(file_.data(), task.content.data(), task.content.size());
  }
  seal_block(key_, task.name, file_.data(), block_bytes_);
  return write_block_file(path, file_.data(), block_file_bytes(block_bytes_), is_direct_);
}

// False where the block was given up before the last layer.
bool BlockWriter::copy(const Task& task) {
  const KvCacheView& view = task.view;
  int32_t layer = 0;
  for (; layer < view.num_layers && !is_given_up_; ++layer) {
    std::memcpy(file_.data() + layer * view.block_bytes(), view.key(layer, task.block_id, 0),
                view.block_bytes());
  }
  {
    const std::lock_guard lock(mutex_);
    copied_id_ = -1;
    --num_uncopied_;
  }
  changed_.notify_all();
  return layer == view.num_layers;
}

void BlockWriter::end(std::string name, int error) {
  outcomes_.push_back({std::move(name), error});
}

}  // namespace lmi
