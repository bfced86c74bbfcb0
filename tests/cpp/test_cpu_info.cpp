#include "common/cpu_info.h"

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "check.h"

namespace lmi {
namespace {

// A directory that stands for the machine's /proc and /sys.
class FakeRoot {
 public:
  FakeRoot() {
    char name[] = "/tmp/lmi-test-XXXXXX";
    EXPECT(mkdtemp(name) != nullptr);
    path_ = name;
  }
  ~FakeRoot() { std::filesystem::remove_all(path_); }

  const std::string& path() const { return path_; }
  void write(const std::string& file, const std::string& text) const {
    const std::filesystem::path full = path_ + file;
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(full) << text;
  }

 private:
  std::string path_;
};

TEST(cgroup_limits_of_v2_are_the_smallest_of_all_ancestors) {
  const FakeRoot root;
  root.write("/proc/self/cgroup", "0::/pod/box\n");
  root.write("/sys/fs/cgroup/pod/box/cpu.max", "max 100000\n");
  root.write("/sys/fs/cgroup/pod/cpu.max", "150000 100000\n");
  root.write("/sys/fs/cgroup/pod/box/memory.max", "8589934592\n");
  root.write("/sys/fs/cgroup/pod/memory.max", "max\n");
  EXPECT_EQ(cgroup_cpu_quota(root.path()), 1.5);
  EXPECT_EQ(cgroup_memory_limit(root.path()), int64_t{8589934592});
}

// In a container the path of /proc/self/cgroup is the host's: only the mount point is there.
TEST(cgroup_limits_of_v1_are_found_at_the_mount_point) {
  const FakeRoot root;
  root.write("/proc/self/cgroup", "5:cpu,cpuacct:/docker/123\n4:memory:/docker/123\n");
  root.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "300000\n");
  root.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  root.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824\n");
  EXPECT_EQ(cgroup_cpu_quota(root.path()), 3.0);
  EXPECT_EQ(cgroup_memory_limit(root.path()), int64_t{1} << 30);
}

TEST(cgroup_without_limits) {
  const FakeRoot root;
  EXPECT_EQ(cgroup_cpu_quota(root.path()), 0.0);
  root.write("/proc/self/cgroup", "5:cpu:/\n4:memory:/\n");
  root.write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  root.write("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  root.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(cgroup_cpu_quota(root.path()), 0.0);
  EXPECT_EQ(cgroup_memory_limit(root.path()), 0);
}

TEST(cpu_info_keeps_within_quota_and_limit) {
  const FakeRoot root;
  root.write("/proc/cpuinfo", "model name\t: Example 9000\nflags\t\t: sse2 avx2 fma\n");
  root.write("/proc/meminfo", "MemTotal:       4194304 kB\n");
  root.write("/proc/self/cgroup", "0::/\n");
  root.write("/sys/fs/cgroup/cpu.max", "50000 100000\n");
  root.write("/sys/fs/cgroup/memory.max", "1048576\n");
  const CpuInfo info = CpuInfo::detect(root.path());
  EXPECT_EQ(info.model, std::string("Example 9000"));
  EXPECT(info.has_flag("avx2") && !info.has_flag("avx"));
  EXPECT_EQ(info.num_physical_cores, 1);
  EXPECT_EQ(info.memory_bytes, int64_t{4} << 30);
  EXPECT_EQ(info.memory_limit_bytes, int64_t{1} << 20);
}

TEST(cpu_info_names_arm_processors) {
  const FakeRoot root;
  const std::string features = "Features\t: fp asimd asimddp\nCPU implementer\t: 0x41\n";
  root.write("/proc/cpuinfo", features + "CPU part\t: 0xd40\n");
  EXPECT_EQ(CpuInfo::detect(root.path()).model, std::string("Neoverse V1"));
  EXPECT(CpuInfo::detect(root.path()).has_flag("asimddp"));
  root.write("/proc/cpuinfo", features + "CPU part\t: 0xabc\n");
  EXPECT_EQ(CpuInfo::detect(root.path()).model, std::string("Arm, implementer 0x41, part 0xabc"));
}

TEST(cpu_info_counts_hyperthreads_once) {
  const FakeRoot root;
  const int32_t num_logical = CpuInfo::detect().num_logical_cores;
  for (int cpu = 0; cpu < 256; ++cpu) {
    root.write("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/core_id", "5\n");
  }
  EXPECT_EQ(CpuInfo::detect(root.path()).num_physical_cores, 1);
  EXPECT_EQ(CpuInfo::detect(root.path()).num_logical_cores, num_logical);
}

TEST(cpu_info_of_this_machine) {
  const CpuInfo info = CpuInfo::detect();
  EXPECT(info.num_physical_cores >= 1 && info.num_physical_cores <= info.num_logical_cores);
  EXPECT(info.memory_limit_bytes > 0 && info.memory_limit_bytes <= info.memory_bytes);
}

}  // namespace
}  // namespace lmi
