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
constexpr int kPausesPerClockRead = 32;

constexpr uint64_t make_tickets(int64_t num_chunks) {
  return static_cast<uint64_t>(num_chunks) << 32;
}
constexpr int64_t num_chunks_of(uint64_t tickets) { return static_cast<int64_t>(tickets >> 32); }
constexpr int64_t next_of(uint64_t tickets) { return static_cast<int64_t>(tickets & 0xffffffffu); }
constexpr bool has_chunk(uint64_t tickets) { return next_of(tickets) < num_chunks_of(tickets); }
constexpr bool is_idle(uint64_t tickets) { return num_chunks_of(tickets) == 0; }

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word, int count) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

template <typename Condition>
bool spin_until(Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < kPausesPerClockRead; ++i) {
      if (condition()) return true;
      cpu_pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

}  // namespace

ThreadPool::ThreadPool(int32_t num_threads) : num_threads_(num_threads) {
  LMI_CHECK(num_threads >= 1 && num_threads <= 4096, "num_threads is ", num_threads,
            ", allowed are 1 to 4096");
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
  publish_phase(0);
  while (!is_idle(tickets_.load(std::memory_order_acquire))) {
    take_chunks(0);
    wait_until(
        [this] {
          const uint64_t tickets = tickets_.load();
          return has_chunk(tickets) || is_idle(tickets);
        },
        /*is_caller=*/true);
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
    wait_until([this] { return has_chunk(tickets_.load()) || stop_.load(); },
               /*is_caller=*/false);
  }
}

// Works while the present phase, and those that follow it at once, have chunks to hand out.
void ThreadPool::take_chunks(int32_t thread_id) {
  while (has_chunk(tickets_.load(std::memory_order_relaxed))) {
    uint64_t ticket = tickets_.fetch_add(1, std::memory_order_acq_rel);
    if (!has_chunk(ticket)) return;
    // The phase can't end while this ticket is out, so region_ and phase_ are stable.
    const int64_t num_chunks = num_chunks_of(ticket);
    const int32_t phase = phase_;
    int64_t num_done = 0;
    do {
      region_.run_chunk(region_.context, phase, next_of(ticket), thread_id);
      ++num_done;
      // Not drawn past the end: the chunk that was just run may have been the last one out.
      ticket = tickets_.load(std::memory_order_relaxed);
      if (has_chunk(ticket)) ticket = tickets_.fetch_add(1, std::memory_order_acq_rel);
    } while (has_chunk(ticket));
    if (num_done_.fetch_add(num_done, std::memory_order_acq_rel) + num_done == num_chunks) {
      publish_phase(phase + 1);
    }
  }
}

// Called by the one thread that knows that no chunk is out.
void ThreadPool::publish_phase(int32_t phase) {
  int64_t num_chunks = 0;
  while (phase < region_.num_phases) {
    num_chunks = region_.num_chunks(region_.context, phase);
    if (num_chunks > 0) break;
    ++phase;
  }
  phase_ = phase;
  num_done_.store(0, std::memory_order_relaxed);
  tickets_.store(make_tickets(num_chunks));
  // Sleepers count themselves before they look at tickets_ for the last time (both sequentially
  // consistent), so one that this load misses has seen the new phase. This thread takes a chunk
  // itself: a phase of one chunk wakes nobody.
  const bool is_end = num_chunks == 0;
  if (is_end ? is_caller_sleeping_.load() : num_chunks > 1 && num_sleeping_.load() > 0) {
    wake(is_end ? INT_MAX : static_cast<int32_t>(num_chunks - 1));
  }
}

template <typename Condition>
void ThreadPool::wait_until(Condition&& condition, bool is_caller) {
  if (spin_until(condition)) return;
  num_sleeping_.fetch_add(1);
  if (is_caller) is_caller_sleeping_.store(true);
  while (true) {
    const uint32_t epoch = wake_epoch_.load();
    if (condition()) break;
    futex_wait(wake_epoch_, epoch);
  }
  if (is_caller) is_caller_sleeping_.store(false);
  num_sleeping_.fetch_sub(1);
}

void ThreadPool::wake(int32_t num_sleepers) {
  wake_epoch_.fetch_add(1);
  futex_wake(wake_epoch_, num_sleepers);
}

}  // namespace lmi
