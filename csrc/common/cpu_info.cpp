#include "common/cpu_info.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>
#include <utility>

namespace lmi {
namespace {

std::string read_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// A leading integer; `fallback` where there is none.
int64_t parse_int(const std::string& text, int64_t fallback) {
  std::istringstream stream(text);
  int64_t value = 0;
  return stream >> value ? value : fallback;
}

std::string trimmed(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t");
  if (first == std::string::npos) return "";
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

// Directories of one controller's cgroup and its ancestors, the innermost first. A path that is not
// visible from inside a container ends at the mount point, which is the container's own group
// there.
std::vector<std::string> cgroup_directories(const std::string& root,
                                            const std::string& controller) {
  const std::string mounts = root + "/sys/fs/cgroup";
  std::vector<std::string> directories;
  const auto add_with_ancestors = [&](const std::string& mount, std::string path) {
    while (!path.empty() && path != "/") {
      directories.push_back(mount + path);
      path.resize(path.rfind('/'));
    }
    directories.push_back(mount);
  };
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // id:controllers:path
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      add_with_ancestors(mounts, path);
      add_with_ancestors(mounts + "/unified", path);
    } else if (("," + controllers + ",").find("," + controller + ",") != std::string::npos) {
      add_with_ancestors(mounts + "/" + controllers, path);
      add_with_ancestors(mounts + "/" + controller, path);
    }
  }
  return directories;
}

void keep_smallest_positive(double value, double* smallest) {
  if (value > 0 && (*smallest == 0 || value < *smallest)) *smallest = value;
}

std::vector<int> affinity_cpus() {
  for (int num_bits = 1024; num_bits <= (1 << 18); num_bits *= 2) {
    cpu_set_t* set = CPU_ALLOC(num_bits);
    const size_t num_bytes = CPU_ALLOC_SIZE(num_bits);
    std::vector<int> cpus;
    if (sched_getaffinity(0, num_bytes, set) == 0) {
      for (int cpu = 0; cpu < num_bits; ++cpu) {
        if (CPU_ISSET_S(cpu, num_bytes, set)) cpus.push_back(cpu);
      }
    }
    CPU_FREE(set);
    if (!cpus.empty()) return cpus;
  }
  return {0};
}

int32_t count_physical_cores(const std::string& root, const std::vector<int>& cpus) {
  std::set<std::pair<int64_t, int64_t>> cores;
  for (const int cpu : cpus) {
    const std::string topology =
        root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
    const int64_t core = parse_int(read_line(topology + "core_id"), -1);
    // Without topology every logical core counts as one.
    if (core < 0) return static_cast<int32_t>(cpus.size());
    cores.emplace(parse_int(read_line(topology + "physical_package_id"), 0), core);
  }
  return static_cast<int32_t>(cores.size());
}

int64_t parse_cache_size(const std::string& text) {
  const int64_t size = parse_int(text, 0);
  if (text.find('K') != std::string::npos) return size << 10;
  if (text.find('M') != std::string::npos) return size << 20;
  return size;
}

void read_caches(const std::string& root, int cpu, CpuInfo* info) {
  const std::string base =
      root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/cache/index";
  for (int index = 0; index < 8; ++index) {
    const std::string cache = base + std::to_string(index) + "/";
    const int64_t level = parse_int(read_line(cache + "level"), 0);
    if (level == 0) break;
    const int64_t num_bytes = parse_cache_size(read_line(cache + "size"));
    const bool is_data = read_line(cache + "type") != "Instruction";
    if (level == 1 && is_data) info->l1d_bytes = num_bytes;
    if (level == 2) info->l2_bytes = num_bytes;
    if (level == 3) info->l3_bytes = num_bytes;
  }
}

// Arm's /proc/cpuinfo has numbers, of which these are the servers' of Arm's own (implementer 0x41).
std::string arm_model(const std::string& implementer, const std::string& part) {
  constexpr std::pair<const char*, const char*> kNames[] = {
      {"0xd08", "Cortex-A72"},  {"0xd0c", "Neoverse N1"}, {"0xd40", "Neoverse V1"},
      {"0xd49", "Neoverse N2"}, {"0xd4f", "Neoverse V2"},
  };
  if (part.empty()) return "";
  for (const auto& [number, name] : kNames) {
    if (implementer == "0x41" && part == number) return name;
  }
  return "Arm, implementer " + implementer + ", part " + part;
}

void read_cpuinfo(const std::string& root, CpuInfo* info) {
  std::ifstream file(root + "/proc/cpuinfo");
  std::string implementer, part;
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const std::string key = trimmed(line.substr(0, colon));
    const std::string value = trimmed(line.substr(colon + 1));
    if (key == "model name" && info->model.empty()) info->model = value;
    if (key == "CPU implementer") implementer = value;
    if (key == "CPU part") part = value;
    if ((key == "flags" || key == "Features") && info->flags.empty()) {
      std::istringstream words(value);
      for (std::string flag; words >> flag;) info->flags.push_back(flag);
    }
  }
  if (info->model.empty()) info->model = arm_model(implementer, part);
  std::sort(info->flags.begin(), info->flags.end());
}

int64_t read_memory_bytes(const std::string& root) {
  std::ifstream file(root + "/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("MemTotal:", 0) == 0) return parse_int(line.substr(9), 0) << 10;
  }
  return 0;
}

}  // namespace

double cgroup_cpu_quota(const std::string& root) {
  double quota = 0;
  for (const std::string& directory : cgroup_directories(root, "cpu")) {
    std::istringstream v2(read_line(directory + "/cpu.max"));  // "max 100000" or "150000 100000"
    double time_us = 0;
    double period_us = 0;
    if (v2 >> time_us >> period_us && period_us > 0) {
      keep_smallest_positive(time_us / period_us, &quota);
    }
    const int64_t v1_time_us = parse_int(read_line(directory + "/cpu.cfs_quota_us"), -1);
    const int64_t v1_period_us = parse_int(read_line(directory + "/cpu.cfs_period_us"), 0);
    if (v1_time_us > 0 && v1_period_us > 0) {
      keep_smallest_positive(static_cast<double>(v1_time_us) / static_cast<double>(v1_period_us),
                             &quota);
    }
  }
  return quota;
}

int64_t cgroup_memory_limit(const std::string& root) {
  // v1 says "no limit" with a number near 2^63.
  constexpr int64_t kNoLimit = int64_t{1} << 60;
  int64_t limit = 0;
  for (const std::string& directory : cgroup_directories(root, "memory")) {
    for (const char* name : {"/memory.max", "/memory.limit_in_bytes"}) {
      const int64_t value = parse_int(read_line(directory + name), 0);
      if (value > 0 && value < kNoLimit && (limit == 0 || value < limit)) limit = value;
    }
  }
  return limit;
}

bool CpuInfo::has_flag(const std::string& flag) const {
  return std::binary_search(flags.begin(), flags.end(), flag);
}

CpuInfo CpuInfo::detect(const std::string& root) {
  CpuInfo info;
  const std::vector<int> cpus = affinity_cpus();
  read_cpuinfo(root, &info);
  read_caches(root, cpus.front(), &info);
  info.num_logical_cores = static_cast<int32_t>(cpus.size());
  info.num_physical_cores = count_physical_cores(root, cpus);
  const double quota = cgroup_cpu_quota(root);
  if (quota > 0) {
    info.num_physical_cores = std::clamp(static_cast<int32_t>(quota), 1, info.num_physical_cores);
  }
  info.memory_bytes = read_memory_bytes(root);
  const int64_t limit = cgroup_memory_limit(root);
  info.memory_limit_bytes = limit > 0 ? std::min(limit, info.memory_bytes) : info.memory_bytes;
  return info;
}

}  // namespace lmi
