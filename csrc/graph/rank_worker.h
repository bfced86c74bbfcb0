// The worker of a rank other than 0, which replays the steps that rank 0 hands out.
#pragma once

#include <cstdint>

#include "graph/graph.h"
#include "graph/rank_group.h"

namespace lmi {

// Returns when the group is closed. Throws what ended the group else; what a step throws here ends
// it.
void serve_rank(RankGroup& group, Graph& graph, int32_t num_threads);

}  // namespace lmi
