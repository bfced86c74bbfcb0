// Which instruction sets this build and this CPU have, and the kernel table of each.
#include <cstdlib>

#include "common/check.h"
#include "cpu/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace lmi::cpu {

namespace scalar {
const Kernels& table();
}
namespace avx2 {
const Kernels& table();
}
namespace avx512 {
const Kernels& table();
}
namespace avx512_bf16 {
const Kernels& table();
}

namespace {

constexpr InstructionSet kLevels[] = {InstructionSet::kScalar, InstructionSet::kAvx2,
                                      InstructionSet::kAvx512, InstructionSet::kAvx512Bf16};

#if defined(__x86_64__)

struct Registers {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

constexpr bool has_bits(uint32_t value, uint32_t bits) { return (value & bits) == bits; }

// Which vector registers the operating system saves on a context switch (XCR0).
uint32_t saved_registers() {
  uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

// Feature bits as in the vendors' manuals, CPUID leaves 1 and 7.
InstructionSet best_of_cpu() {
  constexpr uint32_t kFma = 1u << 12, kOsxsave = 1u << 27, kAvx = 1u << 28, kF16c = 1u << 29;
  constexpr uint32_t kAvx2 = 1u << 5;
  constexpr uint32_t kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  constexpr uint32_t kVnni = 1u << 11, kBf16 = 1u << 5;
  constexpr uint32_t kYmm = 0x06, kZmm = 0xe6;
  if (!has_bits(cpuid(1, 0).ecx, kFma | kOsxsave | kAvx | kF16c)) return InstructionSet::kScalar;
  const uint32_t saved = saved_registers();
  const Registers extended = cpuid(7, 0);
  if (!has_bits(saved, kYmm) || !has_bits(extended.ebx, kAvx2)) return InstructionSet::kScalar;
  if (!has_bits(saved, kZmm) || !has_bits(extended.ebx, kAvx512)) return InstructionSet::kAvx2;
  const bool has_bf16 = has_bits(extended.ecx, kVnni) && has_bits(cpuid(7, 1).eax, kBf16);
  return has_bf16 ? InstructionSet::kAvx512Bf16 : InstructionSet::kAvx512;
}

#else

InstructionSet best_of_cpu() { return InstructionSet::kScalar; }

#endif

// The table, or null where the build leaves the level out.
const Kernels* find_table(InstructionSet level) {
  switch (level) {
    case InstructionSet::kScalar:
      return &scalar::table();
#if defined(LMI_HAVE_AVX2)
    case InstructionSet::kAvx2:
      return &avx2::table();
#endif
#if defined(LMI_HAVE_AVX512)
    case InstructionSet::kAvx512:
      return &avx512::table();
#endif
#if defined(LMI_HAVE_AVX512_BF16)
    case InstructionSet::kAvx512Bf16:
      return &avx512_bf16::table();
#endif
    default:
      return nullptr;
  }
}

std::string available_names() {
  std::string names;
  for (const InstructionSet level : available_instruction_sets()) {
    if (!names.empty()) names += ", ";
    names += instruction_set_name(level);
  }
  return names;
}

}  // namespace

std::vector<InstructionSet> available_instruction_sets() {
  static const InstructionSet best = best_of_cpu();
  std::vector<InstructionSet> levels;
  for (const InstructionSet level : kLevels) {
    if (level <= best && find_table(level) != nullptr) levels.push_back(level);
  }
  return levels;
}

const char* instruction_set_name(InstructionSet level) {
  switch (level) {
    case InstructionSet::kScalar:
      return "scalar";
    case InstructionSet::kAvx2:
      return "avx2";
    case InstructionSet::kAvx512:
      return "avx512";
    case InstructionSet::kAvx512Bf16:
      return "avx512_bf16";
  }
  return "?";
}

InstructionSet parse_instruction_set(const std::string& name) {
  for (const InstructionSet level : available_instruction_sets()) {
    if (name == instruction_set_name(level)) return level;
  }
  throw Error("instruction set '" + name + "' is not available here; use one of " +
              available_names());
}

InstructionSet default_instruction_set() {
  const char* name = std::getenv("LMI_INSTRUCTION_SET");
  if (name == nullptr || *name == '\0') return available_instruction_sets().back();
  try {
    return parse_instruction_set(name);
  } catch (const Error& error) {
    throw Error(std::string("environment variable LMI_INSTRUCTION_SET: ") + error.what());
  }
}

const Kernels& kernels(InstructionSet level) {
  const Kernels* table = find_table(level);
  LMI_CHECK(table != nullptr, "instruction set ", instruction_set_name(level), " is not built");
  return *table;
}

}  // namespace lmi::cpu
