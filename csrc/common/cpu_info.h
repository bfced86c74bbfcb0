// What the machine offers this process: CPU features, cores and memory within its limits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lmi {

struct CpuInfo {
  std::string model;
  std::vector<std::string> flags;  // as /proc/cpuinfo spells them, sorted
  int32_t num_logical_cores = 1;   // of the affinity mask
  int32_t num_physical_cores = 1;  // of the affinity mask, at most the cgroup's CPU quota
  int64_t l1d_bytes = 0;           // per core; 0: unknown
  int64_t l2_bytes = 0;
  int64_t l3_bytes = 0;
  int64_t memory_bytes = 0;        // of the machine
  int64_t memory_limit_bytes = 0;  // the smaller of memory_bytes and the cgroup's limit

  bool has_flag(const std::string& flag) const;

  // Reads /proc, /sys and the cgroup files below `root` ("" outside tests).
  static CpuInfo detect(const std::string& root = "");
};

// CPUs' worth of time that the cgroups (v1 and v2, every ancestor) allow; 0: no limit.
double cgroup_cpu_quota(const std::string& root = "");
// Bytes that the cgroups allow; 0: no limit.
int64_t cgroup_memory_limit(const std::string& root = "");

}  // namespace lmi
