// Persistent threads that work through phases of chunks: one parallel region per engine step.
//
// A region is a list of phases; a phase is a number of independent chunks. Phases run one after the
// other, chunks of a phase in any order on any thread. A phase ends when its chunks are done, not
// when every thread has arrived: a thread that wakes late, or whose core is taken by somebody else,
// joins at the phase the others have reached and delays nobody unless it holds a chunk. A phase of
// one chunk is run by the thread that found the phase before ended, and nobody else hears of it.
//
// Up to 8 threads draw chunks from one counter. Of more, every 8 have a counter of their own, since
// a cache line that dozens of cores take from each other costs each of them a turn; who finds the
// own one empty takes what is left of the others.
//
// Threads that find no work spin for about 20 us and then sleep on a futex, so an idle pool uses no
// CPU. The caller of run() is thread 0.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace lmi {

class ThreadPool {
 public:
  // num_threads counts the caller of run().
  explicit ThreadPool(int32_t num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int32_t num_threads() const { return num_threads_; }

  // Runs num_phases phases and returns when the last one is done. For each phase,
  // num_chunks(phase) -> int64_t below 2^31 is called once, by one thread, after the phase before
  // it ended (what it prepares, all chunks see); then run_chunk(phase, chunk, thread_id) for every
  // chunk. What a phase wrote is visible to the next ones and to the caller. Neither may throw.
  // One run() at a time.
  template <typename NumChunks, typename RunChunk>
  void run(int32_t num_phases, NumChunks&& num_chunks, RunChunk&& run_chunk) {
    using Functions = std::pair<std::remove_reference_t<NumChunks>*,  //
                                std::remove_reference_t<RunChunk>*>;
    Functions functions{&num_chunks, &run_chunk};
    run_region({num_phases, &functions,
                [](void* context, int32_t phase) -> int64_t {
                  return (*static_cast<Functions*>(context)->first)(phase);
                },
                [](void* context, int32_t phase, int64_t chunk, int32_t thread_id) {
                  (*static_cast<Functions*>(context)->second)(phase, chunk, thread_id);
                }});
  }

  // One phase: run_chunk(chunk, thread_id) for every chunk in [0, num_chunks).
  template <typename RunChunk>
  void parallel_for(int64_t num_chunks, RunChunk&& run_chunk) {
    run(
        1, [num_chunks](int32_t) { return num_chunks; },
        [&run_chunk](int32_t, int64_t chunk, int32_t thread_id) { run_chunk(chunk, thread_id); });
  }

 private:
  struct Region {
    int32_t num_phases = 0;
    void* context = nullptr;
    int64_t (*num_chunks)(void* context, int32_t phase) = nullptr;
    void (*run_chunk)(void* context, int32_t phase, int64_t chunk, int32_t thread_id) = nullptr;
  };

  // What some threads share of the present phase: of every num_threads_ chunks in a row, as many as
  // the threads are.
  struct Counter {
    // Number of chunks in the upper half, the next one to hand out in the lower. In one word, so
    // that a ticket always belongs to the phase it was drawn from.
    alignas(64) std::atomic<uint64_t> tickets{0};
    int32_t first_thread = 0;
    int32_t num_threads = 0;
    alignas(64) std::atomic<int64_t> num_done{0};
  };

  void run_region(const Region& region);
  void run_serially(const Region& region);
  void help(int32_t thread_id);
  void take_chunks(int32_t thread_id);
  bool take_from(Counter& counter, int32_t thread_id);
  int64_t chunks_of(const Counter& counter, int64_t num_chunks) const;
  int64_t chunk_at(const Counter& counter, int64_t index) const;
  Counter& own_counter(int32_t thread_id);
  bool has_chunks() const;
  void publish_phase(int32_t phase, int32_t thread_id);
  void publish_chunks(int64_t num_chunks);
  template <typename IsOver>
  void wait_for_chunks(int32_t thread_id, IsOver&& is_over);
  void wake(int32_t num_sleepers);

  const int32_t num_threads_;
  std::vector<std::thread> helpers_;
  std::vector<Counter> counters_;

  // Written by the thread that publishes a phase, while no chunk is out; read by holders of one.
  Region region_;
  int32_t phase_ = 0;
  int32_t num_open_ = 0;  // the first counters, which have chunks

  alignas(64) std::atomic<int32_t> num_ended_{0};    // of those
  alignas(64) std::atomic<uint32_t> wake_epoch_{0};  // futex word
  std::atomic<bool> has_ended_{true};                // the region
  std::atomic<int32_t> num_sleeping_{0};
  std::atomic<bool> is_caller_sleeping_{false};
  std::atomic<bool> stop_{false};
};

}  // namespace lmi
