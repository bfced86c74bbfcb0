// Places in the code of kernels, of which a return address tells.
#pragma once

#include <cstdint>
#include <string>

namespace lmi::cuda::emulator {

// Within this library.
uint32_t site_of(const void* return_address);

// file:line, and where that was inlined, as far as binutils can tell.
std::string place_of(uint32_t site);

}  // namespace lmi::cuda::emulator
