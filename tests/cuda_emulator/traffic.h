// Counts what a warp's accesses cost: of shared memory the turns that the banks take, of global
// memory the sectors. Accesses of a warp belong together if each is its thread's n-th at a site.
//
// lmi_traffic_begin and lmi_traffic_end are for tests, between which one process runs kernels.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lmi::cuda::emulator::traffic {

enum class Memory : uint8_t { kShared, kGlobal };

void note(Memory memory, bool is_write, uintptr_t address, size_t num_bytes, uint32_t site,
          size_t thread);
void end_block();

}  // namespace lmi::cuda::emulator::traffic

extern "C" {
__attribute__((visibility("default"))) void lmi_traffic_begin(void);
// Lines of "memory access requests least actual place", the costliest first; valid until the next.
__attribute__((visibility("default"))) const char* lmi_traffic_end(void);
}
