// The worker of a device of a rank other than 0, which launches the steps that rank 0 hands out.
#pragma once

#include <string>

#include "cuda/step_list.h"
#include "graph/rank_group.h"

namespace lmi {

// Returns when the group is closed. When it is lost, or a step fails here, which loses it, the
// process ends at once: the device may wait for another rank for ever, and everything that is
// closed in order waits for the device.
void serve_device_rank(RankGroup& group, const std::string& library, LmiStepList* list);

}  // namespace lmi
