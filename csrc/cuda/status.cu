// The library's version, its last error, its notices, and whether it can run here.
#include <deque>
#include <mutex>

#include "cuda/launch.cuh"
#include "cuda/runtime.cuh"

namespace lmi::cuda {

std::string& error_text() {
  thread_local std::string text;
  return text;
}

bool& uses_dependent_launch() {
  static bool is_used = false;
  return is_used;
}

namespace {

// Texts stay where they are when others follow.
struct Notices {
  std::mutex mutex;
  std::deque<std::string> texts;
};

// Never destroyed: other threads may still ask when the process ends.
Notices& notices() {
  static auto* all = new Notices;
  return *all;
}

struct NoArgs {};

__global__ void probe_kernel(NoArgs) { wait_for_earlier_kernels(); }

}  // namespace

void add_notice(const std::string& text) {
  const std::lock_guard<std::mutex> lock(notices().mutex);
  notices().texts.push_back(text);
}

}  // namespace lmi::cuda

using namespace lmi::cuda;

int32_t lmi_cuda_version(void) { return LMI_CUDA_VERSION; }

const char* lmi_cuda_error(void) { return error_text().c_str(); }

const char* lmi_cuda_notice(int32_t number) {
  const std::lock_guard<std::mutex> lock(notices().mutex);
  const auto at = static_cast<size_t>(number);
  return at < notices().texts.size() ? notices().texts[at].c_str() : nullptr;
}

int32_t lmi_cuda_check_device(void) {
  return launch("probe", probe_kernel, {}, kWarpSize, 0, nullptr, NoArgs{});
}

int32_t lmi_cuda_use_dependent_launch(int32_t is_used) {
  if (is_used != 0) {
    int32_t major = 0;
    if (const int32_t status = runtime::find_compute_major(&major); status != kOk) return status;
    if (major < 9) return fail("programmatic dependent launch: GPUs from sm_90 on have it");
  }
  uses_dependent_launch() = is_used != 0;
  return kOk;
}

int32_t lmi_cuda_is_emulator(void) {
#if defined(LMI_CUDA_EMULATOR)
  return 1;
#else
  return 0;
#endif
}
