#include "graph/rank_worker.h"

#include <exception>
#include <vector>

#include "common/aligned_memory.h"
#include "common/thread_pool.h"

namespace lmi {

void serve_rank(RankGroup& group, Graph& graph, int32_t num_threads) {
  ThreadPool pool(num_threads);
  AlignedMemory memory(num_threads * cpu::kScratchBytes);
  std::vector<cpu::Scratch> scratch;
  for (int32_t i = 0; i < num_threads; ++i) {
    scratch.push_back({memory.data() + i * cpu::kScratchBytes, cpu::kScratchBytes});
  }
  try {
    while (const StepView* step = group.next_step()) graph.run(*step, pool, scratch);
  } catch (const std::exception& error) {
    group.lose("rank " + std::to_string(group.rank()) + " failed: " + error.what());
    throw;
  }
  if (group.is_lost()) throw LostRankError(group.reason());
}

}  // namespace lmi
