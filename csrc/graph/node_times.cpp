// Replaying with a clock around every chunk, to see which node takes how long.
#include <ctime>

#include "common/check.h"
#include "graph/graph.h"

namespace lmi {

namespace {

int64_t read_clock_ns(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

}  // namespace

void Graph::measure_nodes(int32_t num_tokens, int32_t as_threads) {
  LMI_CHECK(as_threads >= 0, "as_threads is ", as_threads, ", not at least 0");
  node_times_ = std::vector<NodeTime>(nodes_.size());
  measured_tokens_ = num_tokens;
  measured_as_threads_ = as_threads;
}

void Graph::run_measured(const StepView& step, ThreadPool& pool,
                         std::vector<cpu::Scratch>& scratch) {
  const int32_t num_threads = measured_as_threads_ > 0 ? measured_as_threads_ : pool.num_threads();
  NodeTime* running = nullptr;
  int64_t started_ns = 0;
  const auto finish_node = [&](NodeTime* next) {
    const int64_t now_ns = read_clock_ns(CLOCK_MONOTONIC);
    if (running != nullptr) {
      running->wall_ns += now_ns - started_ns;
      ++running->num_steps;
    }
    running = next;
    started_ns = now_ns;
  };
  pool.run(
      static_cast<int32_t>(nodes_.size()),
      [&](int32_t node_id) {
        finish_node(&node_times_[node_id]);
        const int64_t num_chunks = start_node(node_id, step, num_threads);
        node_times_[node_id].num_chunks += num_chunks;
        return num_chunks;
      },
      [&](int32_t node_id, int64_t chunk, int32_t thread_id) {
        const int64_t start_ns = read_clock_ns(CLOCK_THREAD_CPUTIME_ID);
        run_chunk(node_id, chunk, num_threads, scratch[thread_id]);
        node_times_[node_id].cpu_ns.fetch_add(read_clock_ns(CLOCK_THREAD_CPUTIME_ID) - start_ns,
                                              std::memory_order_relaxed);
      });
  finish_node(nullptr);
}

}  // namespace lmi
