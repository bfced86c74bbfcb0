// The library's version, its last error, and whether it can run here.
#include "cuda/launch.cuh"

namespace lmi::cuda {

std::string& error_text() {
  thread_local std::string text;
  return text;
}

namespace {

struct NoArgs {};

__global__ void probe_kernel(NoArgs) {}

}  // namespace
}  // namespace lmi::cuda

using namespace lmi::cuda;

int32_t lmi_cuda_version(void) { return LMI_CUDA_VERSION; }

const char* lmi_cuda_error(void) { return error_text().c_str(); }

int32_t lmi_cuda_check_device(void) {
  return launch("probe", probe_kernel, {}, kWarpSize, 0, nullptr, NoArgs{});
}

int32_t lmi_cuda_is_emulator(void) {
#if defined(LMI_CUDA_EMULATOR)
  return 1;
#else
  return 0;
#endif
}
