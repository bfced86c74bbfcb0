// Persistent threads that work through phases of chunks: one parallel region per engine step.
//
// A region is a list of phases; a phase is a number of independent chunks. Phases run one after the
// other, chunks of a phase in any order on any thread. A phase ends when its chunks are done, not
// when every thread has arrived: a thread that wakes late, or whose core is taken by somebody else,
// joins at the phase the others have reached and delays nobody unless it holds a chunk.
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

  void run_region(const Region& region);
  void run_serially(const Region& region);
  void help(int32_t thread_id);
  void take_chunks(int32_t thread_id);
  void publish_phase(int32_t phase);
  template <typename Condition>
  void wait_until(Condition&& condition, bool is_caller);
  void wake(int32_t num_sleepers);

  const int32_t num_threads_;
  std::vector<std::thread> helpers_;

  // Written by the thread that publishes a phase, while no chunk is out; read by holders of one.
  Region region_;
  int32_t phase_ = 0;

  // The present phase: number of chunks in the upper half (0: no region runs), the next one to hand
  // out in the lower. In one word, so that a ticket always belongs to the phase it was drawn from.
  alignas(64) std::atomic<uint64_t> tickets_{0};
  alignas(64) std::atomic<int64_t> num_done_{0};
  alignas(64) std::atomic<uint32_t> wake_epoch_{0};  // futex word
  std::atomic<int32_t> num_sleeping_{0};
  std::atomic<bool> is_caller_sleeping_{false};
  std::atomic<bool> stop_{false};
};

}  // namespace lmi
