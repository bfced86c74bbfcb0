#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>
#include <vector>

#include "check.h"
#include "common/thread_pool.h"

namespace lmi {
namespace {

double process_cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

TEST(thread_pool_runs_every_chunk_once) {
  for (const int32_t num_threads : {1, 2, 3, 8, 9, 20}) {
    ThreadPool pool(num_threads);
    for (const int64_t num_chunks : {0, 1, 2, 7, 8, 9, 16, 17, 1000}) {
      std::vector<std::atomic<int32_t>> counts(num_chunks);
      pool.parallel_for(num_chunks, [&](int64_t chunk, int32_t thread_id) {
        if (thread_id >= 0 && thread_id < num_threads) counts[chunk].fetch_add(1);
      });
      for (const auto& count : counts) EXPECT_EQ(count.load(), 1);
    }
  }
}

// Plain, unsynchronised memory carries values from phase to phase: the thread sanitizer sees
// whether phases are ordered.
TEST(thread_pool_phases_see_what_earlier_phases_wrote) {
  constexpr int32_t kNumPhases = 50;
  constexpr int64_t kNumChunks = 17;
  for (const int32_t num_threads : {1, 2, 4, 12}) {
    ThreadPool pool(num_threads);
    for (int repeat = 0; repeat < 20; ++repeat) {
      std::vector<int64_t> values(kNumChunks, 1);
      std::vector<int64_t> previous(kNumChunks);
      int64_t total = 0;
      // Three kinds of phases in turn: many chunks, one chunk, none.
      pool.run(
          3 * kNumPhases,
          [&](int32_t phase) -> int64_t {
            if (phase % 3 == 0) previous = values;
            return phase % 3 == 0 ? kNumChunks : phase % 3 == 1 ? 1 : 0;
          },
          [&](int32_t phase, int64_t chunk, int32_t) {
            if (phase % 3 == 0) {
              values[chunk] = previous[(chunk + 1) % kNumChunks] + chunk;
            } else {
              total = std::accumulate(values.begin(), values.end(), int64_t{0});
            }
          });
      EXPECT_EQ(total, kNumChunks + kNumPhases * kNumChunks * (kNumChunks - 1) / 2);
    }
  }
}

// One of the threads that ran the phase of many chunks, which is then the last to have done so.
TEST(thread_pool_runs_neighbouring_phases_of_one_chunk_on_one_thread) {
  ThreadPool pool(4);
  std::vector<int32_t> threads(300, -1);
  pool.run(
      300, [](int32_t phase) -> int64_t { return phase % 3 == 0 ? 8 : 1; },
      [&](int32_t phase, int64_t, int32_t thread_id) {
        if (phase % 3 != 0) threads[phase] = thread_id;
      });
  for (size_t phase = 1; phase < 300; phase += 3) {
    EXPECT(threads[phase] >= 0);
    EXPECT_EQ(threads[phase], threads[phase + 1]);
  }
}

TEST(thread_pool_asks_for_each_phase_once_and_in_order) {
  ThreadPool pool(3);
  std::vector<int32_t> asked;
  pool.run(
      5,
      [&](int32_t phase) -> int64_t {
        asked.push_back(phase);
        return phase % 2 == 0 ? 10 : 0;
      },
      [](int32_t, int64_t, int32_t) {});
  EXPECT_EQ(asked.size(), 5u);
  for (int32_t phase = 0; phase < 5; ++phase) EXPECT_EQ(asked[phase], phase);
}

// Pauses between and within regions put threads to sleep at every point; none may be left asleep.
TEST(thread_pool_wakes_sleepers) {
  ThreadPool pool(4);
  std::atomic<int64_t> num_run{0};
  for (int region = 0; region < 60; ++region) {
    pool.run(
        3, [](int32_t phase) -> int64_t { return phase == 1 ? 1 : 6; },
        [&](int32_t phase, int64_t chunk, int32_t) {
          if ((phase + chunk + region) % 4 == 0) {
            std::this_thread::sleep_for(std::chrono::microseconds(200));
          }
          num_run.fetch_add(1);
        });
    if (region % 5 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(num_run.load(), 60 * 13);
}

TEST(thread_pool_uses_no_cpu_when_idle) {
  ThreadPool pool(4);
  pool.parallel_for(100, [](int64_t, int32_t) {});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const double before = process_cpu_seconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const double used = process_cpu_seconds() - before;
  EXPECT(used < 0.02, "an idle pool used ", used, " s of 0.2 s");
}

// Many more threads than cores: a phase doesn't wait for threads that hold no chunk, so short
// phases take microseconds and not scheduler time slices (milliseconds each).
TEST(thread_pool_survives_oversubscription) {
  ThreadPool pool(16);
  const auto start = std::chrono::steady_clock::now();
  std::atomic<int64_t> num_run{0};
  pool.run(
      2000, [](int32_t) -> int64_t { return 4; },
      [&](int32_t, int64_t, int32_t) { num_run.fetch_add(1); });
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  EXPECT_EQ(num_run.load(), 8000);
  EXPECT(elapsed.count() < 5.0, "took ", elapsed.count(), " s");
}

TEST(thread_pool_refuses_bad_sizes) {
  EXPECT_ERROR(ThreadPool(0), "num_threads is 0, allowed are 1 to 4096");
  EXPECT_ERROR(ThreadPool(5000), "num_threads is 5000");
}

}  // namespace
}  // namespace lmi
