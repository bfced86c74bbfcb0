#include "kv/block_writer.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <utility>

#include "common/aligned_memory.h"
#include "common/check.h"
#include "common/signal_block.h"
#include "common/yielding_thread.h"
#include "kv/block_file.h"

namespace lmi {
// What the threads do and are asked for. The mutex is never the yielding one's.
struct BlockWriter::Work {
  struct Task {
    std::string name;
    KvCacheView view;
    int32_t block_id = -1;         // in view; -1: the content is at hand
    std::vector<uint8_t> content;  // empty, and no block: the file is removed

    bool is_removal() const { return block_id < 0 && content.empty(); }
  };

  Work(std::string path, const HashKey& hash_key, int64_t num_bytes)
      : directory(std::move(path)),
        key(hash_key),
        block_bytes(num_bytes),
        file(block_file_bytes(num_bytes), true) {}

  void add(Task task);
  bool evicted(int32_t block_id, bool is_last);
  void run();
  int store(const Task& task);
  bool copy(const Task& task);
  void end(std::string name, int error) { outcomes.push_back({std::move(name), error}); }

  const std::string directory;
  const HashKey key;
  const int64_t block_bytes;
  AlignedMemory file;
  YieldingThread files{"lmi-kv-files"};
  bool is_direct = true;
  std::atomic<bool> is_given_up{false};  // the block that is copied
  std::atomic<int64_t> num_uncopied{0};  // tasks of blocks
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Task> tasks;  // guarded by mutex, as is what follows
  int32_t copied_id = -1;  // the block that is copied
  std::vector<Outcome> outcomes;
  bool stop = false;
  bool has_ended = false;
};

BlockWriter::BlockWriter(BlockPool& pool, std::string directory, const HashKey& key,
                         int64_t block_bytes)
    : pool_(pool),
      process_id_(::getpid()),
      work_(std::make_shared<Work>(std::move(directory), key, block_bytes)) {
  const SignalBlock no_signals;
  thread_ = std::thread([work = work_] { work->run(); });
  pthread_setname_np(thread_.native_handle(), "lmi-kv-blocks");
  pool_.on_evict(
      [work = work_](int32_t block_id, bool is_last) { return work->evicted(block_id, is_last); });
}

BlockWriter::~BlockWriter() { close(0); }

void BlockWriter::write(std::string name, const KvCacheView& view, int32_t block_id) {
  const int64_t block_bytes = view.num_layers * view.block_bytes();
  LMI_CHECK(block_id >= 0 && block_id < view.num_blocks, "block ", block_id, " of ",
            view.num_blocks);
  LMI_CHECK(block_bytes == work_->block_bytes, "a block has ", work_->block_bytes, " bytes, not ",
            block_bytes);
  work_->add({std::move(name), view, block_id, {}});
}

void BlockWriter::write(std::string name, std::vector<uint8_t> content) {
  LMI_CHECK(static_cast<int64_t>(content.size()) == work_->block_bytes, "a block has ",
            work_->block_bytes, " bytes, not ", content.size());
  work_->add({std::move(name), {}, -1, std::move(content)});
}

void BlockWriter::remove(std::string name) { work_->add({std::move(name), {}, -1, {}}); }

void BlockWriter::give_up(std::string name) {
  const std::lock_guard lock(work_->mutex);
  work_->end(std::move(name), ECANCELED);
}

std::vector<BlockWriter::Outcome> BlockWriter::take_outcomes() {
  const std::lock_guard lock(work_->mutex);
  return std::exchange(work_->outcomes, {});
}

void BlockWriter::close(double timeout_s) {
  if (!thread_.joinable()) return;
  if (::getpid() != process_id_) {
    // There is no such thread here, and its handle is neither to be joined nor detached.
    new std::thread(std::move(thread_));
    return;
  }
  bool has_ended;
  {
    std::unique_lock lock(work_->mutex);
    work_->stop = true;
    work_->changed.notify_all();
    has_ended = work_->changed.wait_for(lock, std::chrono::duration<double>(timeout_s),
                                        [this] { return work_->has_ended; });
    for (Work::Task& task : work_->tasks) {
      work_->num_uncopied -= task.block_id >= 0;
      work_->end(std::move(task.name), ECANCELED);
    }
    work_->tasks.clear();
    work_->is_given_up = true;
    work_->changed.wait(lock, [this] { return work_->copied_id == -1; });
  }
  has_ended ? thread_.join() : thread_.detach();
  pool_.on_evict({});
}

void BlockWriter::Work::add(Task task) {
  {
    const std::lock_guard lock(mutex);
    if (stop) return end(std::move(task.name), ECANCELED);
    num_uncopied += task.block_id >= 0;
    tasks.push_back(std::move(task));
  }
  changed.notify_all();
}

bool BlockWriter::Work::evicted(int32_t block_id, bool is_last) {
  if (num_uncopied == 0) return true;
  std::unique_lock lock(mutex);
  const auto waiting = std::find_if(tasks.begin(), tasks.end(), [block_id](const Task& task) {
    return task.block_id == block_id;
  });
  if (waiting != tasks.end()) {
    end(std::move(waiting->name), ECANCELED);
    tasks.erase(waiting);
    --num_uncopied;
    return true;
  }
  if (copied_id != block_id) return true;
  if (!is_last) return false;
  is_given_up = true;
  changed.wait(lock, [&] { return copied_id != block_id; });
  return true;
}

void BlockWriter::Work::run() {
  std::unique_lock lock(mutex);
  while (true) {
    changed.wait(lock, [&] { return stop || !tasks.empty(); });
    if (tasks.empty()) break;
    Task task = std::move(tasks.front());
    tasks.pop_front();
    copied_id = task.block_id;
    is_given_up = false;
    lock.unlock();
    const int error = store(task);
    const bool is_removal = task.is_removal();
    std::vector<uint8_t>().swap(task.content);  // nobody waits for that
    lock.lock();
    if (!is_removal) end(std::move(task.name), error);
  }
  lock.unlock();
  files.close();
  lock.lock();
  has_ended = true;
  changed.notify_all();
}

int BlockWriter::Work::store(const Task& task) {
  const std::string path = directory + '/' + task.name;
  if (task.block_id >= 0) {
    if (!copy(task)) return ECANCELED;
  } else if (!task.content.empty()) {
    std::memcpy(file.data(), task.content.data(), task.content.size());
  }
  int error = 0;
  files.run([&] {
    if (task.is_removal()) {
      error = ::unlink(path.c_str()) == 0 ? 0 : errno;
      return;
    }
    seal_block(key, task.name, file.data(), block_bytes);
    error = write_block_file(path, file.data(), block_file_bytes(block_bytes), is_direct);
  });
  return error;
}

// False where the block was given up before the last layer.
bool BlockWriter::Work::copy(const Task& task) {
  const KvCacheView& view = task.view;
  int32_t layer = 0;
  for (; layer < view.num_layers && !is_given_up; ++layer) {
    std::memcpy(file.data() + layer * view.block_bytes(), view.key(layer, task.block_id, 0),
                view.block_bytes());
  }
  {
    const std::lock_guard lock(mutex);
    copied_id = -1;
    --num_uncopied;
  }
  changed.notify_all();
  return layer == view.num_layers;
}

}  // namespace lmi
