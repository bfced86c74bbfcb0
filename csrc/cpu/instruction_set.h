// The levels that kernels are compiled for, of which the best is chosen at load.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lmi::cpu {

// Levels, of each processor worst first. Vnni: dot products of bytes; Bf16: of bf16, too. kAmx has
// kAvx512Bf16's and matrix tiles besides, but comes before it as long as it hasn't run on hardware:
// only who names it has it.
enum class InstructionSet : uint8_t {
  kScalar,
  kAvx2,
  kAvx2Vnni,
  kAvx512,
  kAvx512Vnni,
  kAmx,
  kAvx512Bf16,
  kNeon,
  kNeonDotprod,  // sdot
  kNeonBf16      // bfdot, usdot
};

// Levels compiled into this build that this CPU can run, worst first.
std::vector<InstructionSet> available_instruction_sets();
// "scalar", "avx2_vnni", "neon_bf16" and so on: the enumerators in snake case.
const char* instruction_set_name(InstructionSet level);
// The best level, or the one the environment variable LMI_INSTRUCTION_SET names.
InstructionSet default_instruction_set();
InstructionSet parse_instruction_set(const std::string& name);  // throws Error with what is allowed

}  // namespace lmi::cpu
