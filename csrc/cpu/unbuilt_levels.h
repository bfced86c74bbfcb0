// What a build for one processor leaves out, as `make run` makes it.
#pragma once

#include <vector>

#include "cpu/instruction_set.h"

namespace lmi::cpu {

// Levels that this CPU can run and this build doesn't have, worst first.
std::vector<InstructionSet> unbuilt_instruction_sets();

}  // namespace lmi::cpu
