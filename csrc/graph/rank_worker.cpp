#include "graph/rank_worker.h"

#include <exception>

#include "graph/team.h"

namespace lmi {

void serve_rank(RankGroup& group, Graph& graph, int32_t num_threads) {
  Team team(num_threads);
  try {
    while (const StepView* step = group.next_step()) graph.run(*step, team.pool, team.scratch);
  } catch (const std::exception& error) {
    group.lose("rank " + std::to_string(group.rank()) + " failed: " + error.what());
    throw;
  }
  if (group.is_lost()) throw LostRankError(group.reason());
}

}  // namespace lmi
