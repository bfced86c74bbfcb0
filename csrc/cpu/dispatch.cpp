// Which instruction sets this build and this CPU have, and the kernel table of each.
#include <cstdlib>
#include <string_view>

#include "common/check.h"
#include "cpu/kernels.h"
#include "cpu/unbuilt_levels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace lmi::cpu {

// The tables of the levels that the build has, each in the namespace of its name.
#define LMI_LEVEL_TABLE(name) \
  namespace name {            \
  const Kernels& table();     \
  }
LMI_BUILT_LEVELS(LMI_LEVEL_TABLE)
#undef LMI_LEVEL_TABLE

namespace {

struct BuiltLevel {
  std::string_view name;
  const Kernels& (*table)();
};

#define LMI_LEVEL_ENTRY(name) {#name, name::table},
constexpr BuiltLevel kBuilt[] = {LMI_BUILT_LEVELS(LMI_LEVEL_ENTRY)};
#undef LMI_LEVEL_ENTRY

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
bool has_avx2() {
  constexpr uint32_t kFma = 1u << 12, kOsxsave = 1u << 27, kAvx = 1u << 28, kF16c = 1u << 29;
  constexpr uint32_t kAvx2 = 1u << 5, kYmm = 0x06;
  return has_bits(cpuid(1, 0).ecx, kFma | kOsxsave | kAvx | kF16c) &&
         has_bits(saved_registers(), kYmm) && has_bits(cpuid(7, 0).ebx, kAvx2);
}

bool has_avx2_vnni() {
  constexpr uint32_t kAvxVnni = 1u << 4;
  return has_avx2() && has_bits(cpuid(7, 1).eax, kAvxVnni);
}

bool has_avx512() {
  constexpr uint32_t kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  constexpr uint32_t kZmm = 0xe6;
  return has_avx2() && has_bits(saved_registers(), kZmm) && has_bits(cpuid(7, 0).ebx, kAvx512);
}

bool has_avx512_vnni() {
  constexpr uint32_t kVnni = 1u << 11;
  return has_avx512() && has_bits(cpuid(7, 0).ecx, kVnni);
}

bool has_avx512_bf16() {
  constexpr uint32_t kBf16 = 1u << 5;
  return has_avx512_vnni() && has_bits(cpuid(7, 1).eax, kBf16);
}

#if LMI_AMX_STAND_IN
bool has_amx() { return has_avx512_bf16(); }
#else
// A process asks Linux for the registers of tiles once, for all of its threads.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // as in its asm/prctl.h
  static const bool is_granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return is_granted;
}

bool has_amx() {
  constexpr uint32_t kAmx = 1u << 22 | 1u << 24 | 1u << 25;  // BF16, TILE, INT8
  constexpr uint32_t kTiles = 0x60000;                       // configuration and data
  return has_avx512_bf16() && has_bits(cpuid(7, 0).edx, kAmx) &&
         has_bits(saved_registers(), kTiles) && may_use_tiles();
}
#endif

#elif defined(__aarch64__)

// Bits of AT_HWCAP and AT_HWCAP2 as in Linux' asm/hwcap.h, which old systems' headers lack.
bool has_neon() { return (getauxval(AT_HWCAP) & 1ul << 1) != 0; }

bool has_neon_dotprod() { return has_neon() && (getauxval(AT_HWCAP) & 1ul << 20) != 0; }

bool has_neon_bf16() {
  constexpr unsigned long kI8mm = 1ul << 13, kBf16 = 1ul << 14;
  return has_neon_dotprod() && (getauxval(AT_HWCAP2) & (kI8mm | kBf16)) == (kI8mm | kBf16);
}

#endif

bool has_anything() { return true; }

struct Level {
  InstructionSet id;
  const char* name;
  bool (*runs_here)();
};

// Those of this processor's kind, worst first, built or not.
constexpr Level kLevels[] = {
    {InstructionSet::kScalar, "scalar", has_anything},
#if defined(__x86_64__)
    {InstructionSet::kAvx2, "avx2", has_avx2},
    {InstructionSet::kAvx2Vnni, "avx2_vnni", has_avx2_vnni},
    {InstructionSet::kAvx512, "avx512", has_avx512},
    {InstructionSet::kAvx512Vnni, "avx512_vnni", has_avx512_vnni},
    {InstructionSet::kAmx, "amx", has_amx},
    {InstructionSet::kAvx512Bf16, "avx512_bf16", has_avx512_bf16},
#elif defined(__aarch64__)
    {InstructionSet::kNeon, "neon", has_neon},
    {InstructionSet::kNeonDotprod, "neon_dotprod", has_neon_dotprod},
    {InstructionSet::kNeonBf16, "neon_bf16", has_neon_bf16},
#endif
};

const Level* find_level(InstructionSet id) {
  for (const Level& level : kLevels) {
    if (level.id == id) return &level;
  }
  return nullptr;
}

const BuiltLevel* find_built(std::string_view name) {
  for (const BuiltLevel& built : kBuilt) {
    if (built.name == name) return &built;
  }
  return nullptr;
}

std::vector<InstructionSet> levels_of_this_machine(bool are_built) {
  std::vector<InstructionSet> levels;
  for (const Level& level : kLevels) {
    if (level.runs_here() && (find_built(level.name) != nullptr) == are_built) {
      levels.push_back(level.id);
    }
  }
  return levels;
}

std::string names_of(const std::vector<InstructionSet>& levels) {
  std::string names;
  for (const InstructionSet level : levels) {
    if (!names.empty()) names += ", ";
    names += instruction_set_name(level);
  }
  return names;
}

}  // namespace

std::vector<InstructionSet> available_instruction_sets() {
  static const std::vector<InstructionSet> available = levels_of_this_machine(true);
  return available;
}

std::vector<InstructionSet> unbuilt_instruction_sets() { return levels_of_this_machine(false); }

const char* instruction_set_name(InstructionSet id) {
  const Level* level = find_level(id);
  return level == nullptr ? "?" : level->name;
}

InstructionSet parse_instruction_set(const std::string& name) {
  for (const InstructionSet level : available_instruction_sets()) {
    if (name == instruction_set_name(level)) return level;
  }
  std::string text = "instruction set '" + name + "' is not available here; use one of " +
                     names_of(available_instruction_sets());
  const std::vector<InstructionSet> unbuilt = unbuilt_instruction_sets();
  if (!unbuilt.empty()) {
    text += " (this build leaves out " + names_of(unbuilt) + ": `make build` adds them)";
  }
  throw Error(text);
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

const Kernels& kernels(InstructionSet id) {
  const Level* level = find_level(id);
  const BuiltLevel* built = level == nullptr ? nullptr : find_built(level->name);
  LMI_CHECK(built != nullptr, "instruction set ", static_cast<int>(id), " is not built");
  return built->table();
}

}  // namespace lmi::cpu
