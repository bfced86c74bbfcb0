#include "cuda_emulator/races.h"

#include <algorithm>
#include <array>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/check.h"
#include "cuda_emulator/emulator.h"
#include "cuda_emulator/site.h"
#include "cuda_emulator/traffic.h"

// Where the library's own variables lie, those that kernels share in a block among them.
extern "C" {
extern char __bss_start __attribute__((visibility("hidden")));
extern char _end __attribute__((visibility("hidden")));
}

namespace lmi::cuda::emulator::races {
namespace {

constexpr size_t kWarpSize = 32;
constexpr size_t kPageBytes = 4096;
constexpr size_t kMaxPages = 2048;  // that are kept from grid to grid
constexpr size_t kMaxReports = 4;
constexpr uint16_t kMany = 0xffff;

// Accesses of one kind to a byte. Intervals count barriers of all blocks of all grids, so that a
// number tells the grid and the block too; steps count a warp's barriers.
struct Accesses {
  uint32_t interval = 0;
  uint32_t step = 0;
  uint32_t site = 0;
  uint16_t thread = 0;  // or kMany, of this step
  uint16_t warp = 0;    // or kMany, of this interval
};

struct Byte {
  Accesses writes;
  Accesses reads;
  uint32_t foreign_read = 0;  // the last interval in which a block before this one read it
  uint32_t copied_in = 0;     // the block's first interval if a copy to here is under way
  bool is_atomic = false;     // the last write
};

using Page = std::array<Byte, kPageBytes>;

struct Range {
  uintptr_t first = 0;
  uintptr_t end = 0;
  bool has(uintptr_t address) const { return address >= first && address < end; }
};

// Of barriers: from the first to before the end.
struct Span {
  uint32_t first = 0;
  uint32_t end = 0;
};

enum class Kind : uint8_t { kRead, kWrite, kAtomic };

struct Grid {
  std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
  uintptr_t last_number = 0;
  Page* last_page = nullptr;
  std::vector<Range> ignored;
  Range reserved;
  Range shared;
  uint32_t interval = 1;
  uint32_t first_interval = 1;                                 // of the grid
  uint32_t block_interval = 1;                                 // the block's first
  uint32_t published_interval = 0;                             // the last in which a thread did
  std::vector<uint32_t> steps;                                 // by warp
  std::unordered_map<const void*, std::vector<Span>> arrived;  // at counters, in the grid
  std::vector<Span> seen;                                      // by the block
  uint16_t thread = 0;
  std::vector<std::string> reports;
  std::set<std::pair<uint32_t, uint32_t>> reported;  // sites
  size_t num_races = 0;
};

Grid grid;
bool is_instrumented = false;
thread_local bool is_watching = false;

bool is_shared(uintptr_t address) {
  const Range variables{reinterpret_cast<uintptr_t>(&__bss_start),
                        reinterpret_cast<uintptr_t>(&_end)};
  return grid.reserved.has(address) || variables.has(address);
}

Page& page_of(uintptr_t address) {
  const uintptr_t number = address / kPageBytes;
  if (number != grid.last_number) {
    std::unique_ptr<Page>& page = grid.pages[number];
    if (page == nullptr) page = std::make_unique<Page>();
    grid.last_number = number;
    grid.last_page = page.get();
  }
  return *grid.last_page;
}

// Calls action(byte, address) for every one of them.
template <typename Action>
void for_bytes(uintptr_t first, size_t num_bytes, const Action& action) {
  for (uintptr_t address = first; address < first + num_bytes;) {
    Page& page = page_of(address);
    const uintptr_t end = std::min(first + num_bytes, (address / kPageBytes + 1) * kPageBytes);
    for (; address < end; ++address) action(page[address % kPageBytes], address);
  }
}

uint16_t own_warp() { return static_cast<uint16_t>(grid.thread / kWarpSize); }

bool is_seen(uint32_t interval) {
  return std::any_of(grid.seen.begin(), grid.seen.end(), [&](const Span& span) {
    return span.first <= interval && interval < span.end;
  });
}

// Whether one of the accesses is another thread's, with nothing between it and now.
bool are_unordered(const Accesses& accesses, uintptr_t address) {
  if (accesses.interval < grid.first_interval) return false;
  if (accesses.interval < grid.block_interval) {
    return !is_shared(address) && !is_seen(accesses.interval);
  }
  if (accesses.interval < grid.interval) return false;
  if (accesses.warp != own_warp()) return true;
  return accesses.step == grid.steps[own_warp()] && accesses.thread != grid.thread;
}

void report(const char* what, const Accesses& before, const char* now, uint32_t site,
            uintptr_t address) {
  ++grid.num_races;
  if (grid.reports.size() == kMaxReports || !grid.reported.insert({before.site, site}).second) {
    return;
  }
  const bool are_many = before.thread == kMany || before.warp == kMany;
  std::ostringstream text;
  text << what << " at " << place_of(before.site) << " (thread "
       << (are_many ? "several" : std::to_string(before.thread)) << ") and " << now << " at "
       << place_of(site) << " (thread " << grid.thread << "), "
       << (is_shared(address) ? "shared" : "global") << " memory";
  if (grid.shared.has(address)) text << " byte " << address - grid.shared.first;
  grid.reports.push_back(text.str());
}

void note(Accesses& accesses, uint32_t site) {
  const uint16_t warp = own_warp();
  const uint32_t step = grid.steps[warp];
  if (accesses.interval != grid.interval) {
    accesses = {grid.interval, step, site, grid.thread, warp};
  } else if (accesses.warp != warp) {
    accesses.warp = kMany;
  } else if (accesses.step != step) {
    accesses.step = step;
    accesses.thread = grid.thread;
    accesses.site = site;
  } else if (accesses.thread != grid.thread) {
    accesses.thread = kMany;
  }
}

void note_read(Byte& byte, uint32_t site) {
  if (byte.reads.interval < grid.block_interval && byte.reads.interval >= grid.first_interval) {
    byte.foreign_read = byte.reads.interval;
  }
  note(byte.reads, site);
}

void touch_byte(Byte& byte, uintptr_t address, Kind kind, uint32_t site) {
  const char* const name = kind == Kind::kRead ? "a read" : "a write";
  if (byte.copied_in == grid.block_interval)
    report("a copy under way", byte.writes, name, site, address);
  const bool are_atomic = kind == Kind::kAtomic && byte.is_atomic;
  if (!are_atomic && are_unordered(byte.writes, address)) {
    report("a write", byte.writes, name, site, address);
  }
  if (kind == Kind::kRead) return note_read(byte, site);
  const bool is_read_elsewhere = byte.foreign_read >= grid.first_interval && !is_shared(address);
  if (is_read_elsewhere || are_unordered(byte.reads, address)) {
    report("a read", byte.reads, name, site, address);
  }
  byte.writes = {grid.interval, grid.steps[own_warp()], site, grid.thread, own_warp()};
  byte.is_atomic = kind == Kind::kAtomic;
}

void watch_bytes(uintptr_t address, size_t num_bytes, Kind kind, uint32_t site) {
  for_bytes(address, num_bytes,
            [&](Byte& byte, uintptr_t at) { touch_byte(byte, at, kind, site); });
}

bool is_ignored(uintptr_t address) {
  return std::any_of(grid.ignored.begin(), grid.ignored.end(),
                     [&](const Range& range) { return range.has(address); });
}

void touch(const void* first, size_t num_bytes, Kind kind, const void* caller) {
  const auto address = reinterpret_cast<uintptr_t>(first);
  // A copy of nothing has whatever source.
  if (!is_instrumented || num_bytes == 0 || is_ignored(address)) return;
  const uint32_t site = site_of(caller);
  if (kind != Kind::kAtomic) {
    const auto memory = is_shared(address) ? traffic::Memory::kShared : traffic::Memory::kGlobal;
    traffic::note(memory, kind == Kind::kWrite, address, num_bytes, site, grid.thread);
  }
  if (grid.reserved.has(address) &&
      (address < grid.shared.first || address + num_bytes > grid.shared.end)) {
    report("shared memory's end", {}, "an access beyond it", site, address);
    return;
  }
  if (is_early() && !is_shared(address)) {
    report("the end of earlier kernels", {}, "an access before it", site, address);
  }
  watch_bytes(address, num_bytes, kind, site);
}

}  // namespace

void ignore(const void* first, size_t num_bytes) {
  const auto address = reinterpret_cast<uintptr_t>(first);
  grid.ignored.push_back({address, address + num_bytes});
}

void begin_grid() {
  grid.first_interval = ++grid.interval;
  grid.reports.clear();
  grid.reported.clear();
  grid.num_races = 0;
  grid.arrived.clear();
  if (grid.pages.size() < kMaxPages) return;
  grid.pages.clear();
  grid.last_number = 0;
}

void begin_block(const uint8_t* reserved, size_t num_reserved, const uint8_t* shared,
                 size_t num_bytes) {
  LMI_CHECK(grid.interval < UINT32_MAX / 2, "too many barriers in one process");
  traffic::end_block();
  grid.block_interval = ++grid.interval;
  grid.steps.assign(1024 / kWarpSize, 0);
  grid.seen.clear();
  const auto outer = reinterpret_cast<uintptr_t>(reserved);
  const auto inner = reinterpret_cast<uintptr_t>(shared);
  grid.reserved = {outer, outer + num_reserved};
  grid.shared = {inner, inner + num_bytes};
}

void resume(size_t thread) {
  grid.thread = static_cast<uint16_t>(thread);
  is_watching = true;
}

void pause() { is_watching = false; }

void pass_block_barrier() { ++grid.interval; }

void pass_warp_barrier(size_t warp) { ++grid.steps[warp]; }

void add_atomically(const void* target, size_t num_bytes, const void* site) {
  touch(target, num_bytes, Kind::kAtomic, site);
}

void publish_writes() { grid.published_interval = grid.interval; }

void arrive(const void* counter) {
  const uint32_t end = std::min(grid.published_interval + 1, grid.interval);
  grid.arrived[counter].push_back({grid.block_interval, end});
}

void see_arrivals(const void* counter) {
  if (grid.seen.empty()) grid.seen = grid.arrived[counter];
}

void begin_copy(const void* target, size_t num_bytes, const void* source, size_t num_source_bytes,
                const void* site) {
  if (!is_instrumented) return;
  touch(source, num_source_bytes, Kind::kRead, site);
  touch(target, num_bytes, Kind::kWrite, site);
  const auto address = reinterpret_cast<uintptr_t>(target);
  for_bytes(address, num_bytes,
            [](Byte& byte, uintptr_t) { byte.copied_in = grid.block_interval; });
}

void end_copy(const void* target, size_t num_bytes, const void* site) {
  if (!is_instrumented) return;
  const auto address = reinterpret_cast<uintptr_t>(target);
  for_bytes(address, num_bytes, [](Byte& byte, uintptr_t) { byte.copied_in = 0; });
  watch_bytes(address, num_bytes, Kind::kWrite, site_of(site));
}

std::string end_grid() {
  traffic::end_block();
  std::ostringstream text;
  if (grid.num_races > 0) text << "races over " << grid.num_races << " bytes: ";
  for (const std::string& found : grid.reports) text << "\n  " << found;
  grid.ignored.clear();
  return text.str();
}

}  // namespace lmi::cuda::emulator::races

// ---- what instrumented code calls

namespace {

namespace races = lmi::cuda::emulator::races;

void watch(const void* first, size_t num_bytes, races::Kind kind, const void* caller) {
  if (races::is_watching) races::touch(first, num_bytes, kind, caller);
}

}  // namespace

extern "C" {

void __tsan_init() { races::is_instrumented = true; }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

#define LMI_ACCESS(name, bytes, kind)                                      \
  void __tsan_##name(void* address) {                                      \
    watch(address, bytes, races::Kind::kind, __builtin_return_address(0)); \
  }
#define LMI_ACCESSES(bytes)                       \
  LMI_ACCESS(read##bytes, bytes, kRead)           \
  LMI_ACCESS(write##bytes, bytes, kWrite)         \
  LMI_ACCESS(unaligned_read##bytes, bytes, kRead) \
  LMI_ACCESS(unaligned_write##bytes, bytes, kWrite)
LMI_ACCESSES(1)
LMI_ACCESSES(2)
LMI_ACCESSES(4)
LMI_ACCESSES(8)
LMI_ACCESSES(16)
#undef LMI_ACCESSES
#undef LMI_ACCESS

void __tsan_read_range(void* address, size_t num_bytes) {
  watch(address, num_bytes, races::Kind::kRead, __builtin_return_address(0));
}
void __tsan_write_range(void* address, size_t num_bytes) {
  watch(address, num_bytes, races::Kind::kWrite, __builtin_return_address(0));
}

// Those of kernels are atomic additions; the rest is the host's.
#define LMI_ATOMICS(bits, type)                                                              \
  type __tsan_atomic##bits##_load(const volatile type* address, int) {                       \
    return __atomic_load_n(address, __ATOMIC_SEQ_CST);                                       \
  }                                                                                          \
  void __tsan_atomic##bits##_store(volatile type* address, type value, int) {                \
    __atomic_store_n(address, value, __ATOMIC_SEQ_CST);                                      \
  }                                                                                          \
  type __tsan_atomic##bits##_exchange(volatile type* address, type value, int) {             \
    return __atomic_exchange_n(address, value, __ATOMIC_SEQ_CST);                            \
  }                                                                                          \
  type __tsan_atomic##bits##_fetch_add(volatile type* address, type value, int) {            \
    return __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);                             \
  }                                                                                          \
  type __tsan_atomic##bits##_fetch_sub(volatile type* address, type value, int) {            \
    return __atomic_fetch_sub(address, value, __ATOMIC_SEQ_CST);                             \
  }                                                                                          \
  bool __tsan_atomic##bits##_compare_exchange_strong(volatile type* address, type* expected, \
                                                     type desired, int, int) {               \
    return __atomic_compare_exchange_n(address, expected, desired, false, __ATOMIC_SEQ_CST,  \
                                       __ATOMIC_SEQ_CST);                                    \
  }
LMI_ATOMICS(8, uint8_t)
LMI_ATOMICS(32, uint32_t)
LMI_ATOMICS(64, uint64_t)
#undef LMI_ATOMICS
}
