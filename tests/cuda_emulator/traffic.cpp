#include "cuda_emulator/traffic.h"

#include <algorithm>
#include <array>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "cuda_emulator/site.h"

namespace lmi::cuda::emulator::traffic {
namespace {

constexpr size_t kWarpSize = 32;
constexpr size_t kNumBanks = 32;
constexpr size_t kWordBytes = 4;
constexpr size_t kSectorBytes = 32;

struct Access {
  uintptr_t address = 0;
  size_t num_bytes = 0;  // 0: the lane has none
};

struct Request {
  Memory memory = Memory::kGlobal;
  bool is_write = false;
  std::array<Access, kWarpSize> lanes;
};

struct Key {
  uint32_t site;
  uint32_t nth;
  uint32_t warp;
  bool operator==(const Key&) const = default;
};

struct Hash {
  size_t operator()(const Key& key) const {
    return (size_t{key.site} * 1000003 + key.nth) * 1009 + key.warp;
  }
};

struct Total {
  Memory memory = Memory::kGlobal;
  bool is_write = false;
  uint64_t num_requests = 0;
  uint64_t least = 0;
  uint64_t actual = 0;
};

struct Counts {
  bool is_counting = false;
  std::unordered_map<Key, Request, Hash> requests;            // of the block
  std::unordered_map<uint64_t, uint32_t> num_by_site_thread;  // of the block
  std::unordered_map<uint32_t, Total> totals;                 // by site
  std::string text;
};

Counts counts;

// Numbers of the units of that many bytes that lanes first .. end - 1 touch.
std::set<uintptr_t> units(const Request& request, size_t unit_bytes, size_t first, size_t end) {
  std::set<uintptr_t> numbers;
  for (size_t lane = first; lane < end; ++lane) {
    const auto& [address, num_bytes] = request.lanes[lane];
    for (size_t i = 0; i < num_bytes; ++i) numbers.insert((address + i) / unit_bytes);
  }
  return numbers;
}

// Accesses of 8 and 16 bytes are served by halves and quarters of the warp.
void count_turns(const Request& request, Total& total) {
  size_t width = kWordBytes;
  for (const Access& access : request.lanes) width = std::max(width, access.num_bytes);
  const size_t num_lanes = kWarpSize * kWordBytes / width;
  for (size_t first = 0; first < kWarpSize; first += num_lanes) {
    const std::set<uintptr_t> words = units(request, kWordBytes, first, first + num_lanes);
    std::array<uint64_t, kNumBanks> by_bank{};
    for (const uintptr_t word : words) ++by_bank[word % kNumBanks];
    total.actual += *std::max_element(by_bank.begin(), by_bank.end());
    total.least += (words.size() + kNumBanks - 1) / kNumBanks;
  }
}

void count_sectors(const Request& request, Total& total) {
  const size_t num_words = units(request, kWordBytes, 0, kWarpSize).size();
  total.actual += units(request, kSectorBytes, 0, kWarpSize).size();
  total.least += (num_words * kWordBytes + kSectorBytes - 1) / kSectorBytes;
}

}  // namespace

void note(Memory memory, bool is_write, uintptr_t address, size_t num_bytes, uint32_t site,
          size_t thread) {
  if (!counts.is_counting || num_bytes == 0) return;
  const uint32_t nth = counts.num_by_site_thread[uint64_t{site} << 16 | thread]++;
  Request& request = counts.requests[{site, nth, static_cast<uint32_t>(thread / kWarpSize)}];
  request.memory = memory;
  request.is_write = is_write;
  request.lanes[thread % kWarpSize] = {address, num_bytes};
}

void end_block() {
  for (const auto& [key, request] : counts.requests) {
    Total& total = counts.totals[key.site];
    total.memory = request.memory;
    total.is_write = request.is_write;
    ++total.num_requests;
    if (request.memory == Memory::kShared) {
      count_turns(request, total);
    } else {
      count_sectors(request, total);
    }
  }
  counts.requests.clear();
  counts.num_by_site_thread.clear();
}

}  // namespace lmi::cuda::emulator::traffic

using namespace lmi::cuda::emulator;
using traffic::counts;

void lmi_traffic_begin(void) {
  counts.totals.clear();
  counts.is_counting = true;
}

const char* lmi_traffic_end(void) {
  counts.is_counting = false;
  std::vector<std::pair<uint32_t, traffic::Total>> totals(counts.totals.begin(),
                                                          counts.totals.end());
  std::sort(totals.begin(), totals.end(), [](const auto& a, const auto& b) {
    return std::tie(b.second.actual, b.first) < std::tie(a.second.actual, a.first);
  });
  std::ostringstream lines;
  for (const auto& [site, total] : totals) {
    lines << (total.memory == traffic::Memory::kShared ? "shared" : "global")
          << (total.is_write ? " write " : " read ") << total.num_requests << ' ' << total.least
          << ' ' << total.actual << ' ' << place_of(site) << '\n';
  }
  counts.text = lines.str();
  return counts.text.c_str();
}
