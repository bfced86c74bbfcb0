#include "common/thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <string>

#include "common/check.h"
#include "common/signal_block.h"
#include "common/spin.h"

namespace lmi {
namespace {

constexpr std::chrono::microseconds kSpinTime{20};
constexpr int32_t kThreadsPerCounter = 8;

constexpr uint64_t make_tickets(int64_t num_chunks) {
  return static_cast<uint64_t>(num_chunks) << 32;
}
constexpr int64_t num_chunks_of(uint64_t tickets) { return static_cast<int64_t>(tickets >> 32); }
constexpr int64_t next_of(uint64_t tickets) { return static_cast<int64_t>(tickets & 0xffffffffu); }
constexpr bool has_chunk(uint64_t tickets) { return next_of(tickets) < num_chunks_of(tickets); }
void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word, int count) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

}  // namespace

ThreadPool::ThreadPool(int32_t num_threads)
    : num_threads_(num_threads),
      counters_((std::max(num_threads, 1) + kThreadsPerCounter - 1) / kThreadsPerCounter) {
  LMI_CHECK(num_threads >= 1 && num_threads <= 4096, "num_threads is ", num_threads,
            ", allowed are 1 to 4096");
  for (size_t i = 0; i < counters_.size(); ++i) {
    counters_[i].first_thread = static_cast<int32_t>(i) * kThreadsPerCounter;
    counters_[i].num_threads =
        std::min(kThreadsPerCounter, num_threads - counters_[i].first_thread);
  }
  const SignalBlock no_signals;
  for (int32_t thread_id = 1; thread_id < num_threads; ++thread_id) {
    helpers_.emplace_back([this, thread_id] { help(thread_id); });
    const std::string name = "lmi-pool-" + std::to_string(thread_id);
    pthread_setname_np(helpers_.back().native_handle(), name.c_str());
  }
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  wake(INT_MAX);
  for (std::thread& helper : helpers_) helper.join();
}

void ThreadPool::run_region(const Region& region) {
  if (num_threads_ == 1) return run_serially(region);
  region_ = region;
  has_ended_.store(false);
  publish_phase(0, /*thread_id=*/0);
  while (!has_ended_.load(std::memory_order_acquire)) {
    take_chunks(0);
    wait_for_chunks(0, [this] { return has_ended_.load(); });
  }
}

void ThreadPool::run_serially(const Region& region) {
  for (int32_t phase = 0; phase < region.num_phases; ++phase) {
    const int64_t num_chunks = region.num_chunks(region.context, phase);
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      region.run_chunk(region.context, phase, chunk, 0);
    }
  }
}

void ThreadPool::help(int32_t thread_id) {
  while (!stop_.load()) {
    take_chunks(thread_id);
    wait_for_chunks(thread_id, [this] { return stop_.load(); });
  }
}

ThreadPool::Counter& ThreadPool::own_counter(int32_t thread_id) {
  return counters_[thread_id / kThreadsPerCounter];
}

// Works while the present phase, and those that follow it at once, have chunks to hand out.
void ThreadPool::take_chunks(int32_t thread_id) {
  size_t num_empty = 0;
  while (num_empty < counters_.size()) {
    const size_t next = thread_id / kThreadsPerCounter + num_empty;
    num_empty = take_from(counters_[next % counters_.size()], thread_id) ? 0 : num_empty + 1;
  }
}

// Whether there was a chunk.
bool ThreadPool::take_from(Counter& counter, int32_t thread_id) {
  if (!has_chunk(counter.tickets.load(std::memory_order_relaxed))) return false;
  uint64_t ticket = counter.tickets.fetch_add(1, std::memory_order_acq_rel);
  if (!has_chunk(ticket)) return false;
  // The phase can't end while this ticket is out, so these are stable.
  const int64_t num_chunks = num_chunks_of(ticket);
  const int32_t phase = phase_;
  const int32_t num_open = num_open_;
  int64_t num_done = 0;
  do {
    region_.run_chunk(region_.context, phase, chunk_at(counter, next_of(ticket)), thread_id);
    ++num_done;
    // Not drawn past the end: the chunk that was just run may have been the last one out.
    ticket = counter.tickets.load(std::memory_order_relaxed);
    if (has_chunk(ticket)) ticket = counter.tickets.fetch_add(1, std::memory_order_acq_rel);
  } while (has_chunk(ticket));
  const int64_t num_before = counter.num_done.fetch_add(num_done, std::memory_order_acq_rel);
  if (num_before + num_done != num_chunks) return true;
  if (num_open == 1 || num_ended_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_open) {
    publish_phase(phase + 1, thread_id);
  }
  return true;
}

int64_t ThreadPool::chunks_of(const Counter& counter, int64_t num_chunks) const {
  const int64_t rest = num_chunks % num_threads_ - counter.first_thread;
  return num_chunks / num_threads_ * counter.num_threads +
         std::clamp<int64_t>(rest, 0, counter.num_threads);
}

int64_t ThreadPool::chunk_at(const Counter& counter, int64_t index) const {
  if (counters_.size() == 1) return index;
  return index / counter.num_threads * num_threads_ + counter.first_thread +
         index % counter.num_threads;
}

bool ThreadPool::has_chunks() const {
  return std::any_of(counters_.begin(), counters_.end(),
                     [](const Counter& counter) { return has_chunk(counter.tickets.load()); });
}

// Called by the one thread that knows that no chunk is out.
void ThreadPool::publish_phase(int32_t phase, int32_t thread_id) {
  for (; phase < region_.num_phases; ++phase) {
    const int64_t num_chunks = region_.num_chunks(region_.context, phase);
    if (num_chunks > 1) {
      phase_ = phase;
      return publish_chunks(num_chunks);
    }
    if (num_chunks == 1) region_.run_chunk(region_.context, phase, 0, thread_id);
  }
  has_ended_.store(true);
  if (is_caller_sleeping_.load()) wake(INT_MAX);
}

void ThreadPool::publish_chunks(int64_t num_chunks) {
  const int64_t num_wanted = (num_chunks - 1) / kThreadsPerCounter + 1;
  const auto num_open = static_cast<int32_t>(std::min<int64_t>(counters_.size(), num_wanted));
  num_open_ = num_open;
  num_ended_.store(0, std::memory_order_relaxed);
  for (int32_t i = 0; i < num_open; ++i) counters_[i].num_done.store(0, std::memory_order_relaxed);
  // Nothing of this phase is stored behind the last counter's chunks, with which it may end.
  for (int32_t i = 0; i < num_open; ++i) {
    const bool is_last = i + 1 == num_open;
    counters_[i].tickets.store(make_tickets(chunks_of(counters_[i], num_chunks)),
                               is_last ? std::memory_order_seq_cst : std::memory_order_release);
  }
  // Sleepers count themselves before they look at the counters for the last time (both sequentially
  // consistent), so one that this load misses has seen the new phase. This thread takes a chunk
  // itself.
  if (num_sleeping_.load() > 0) wake(static_cast<int32_t>(num_chunks - 1));
}

template <typename IsOver>
void ThreadPool::wait_for_chunks(int32_t thread_id, IsOver&& is_over) {
  const Counter& own = own_counter(thread_id);
  if (spin_until([&] { return has_chunk(own.tickets.load()) || is_over(); }, kSpinTime)) return;
  num_sleeping_.fetch_add(1);
  if (thread_id == 0) is_caller_sleeping_.store(true);
  while (true) {
    const uint32_t epoch = wake_epoch_.load();
    if (has_chunks() || is_over()) break;
    futex_wait(wake_epoch_, epoch);
  }
  if (thread_id == 0) is_caller_sleeping_.store(false);
  num_sleeping_.fetch_sub(1);
}

void ThreadPool::wake(int32_t num_sleepers) {
  wake_epoch_.fetch_add(1);
  futex_wake(wake_epoch_, num_sleepers);
}

}  // namespace lmi
