#include "cuda_emulator/site.h"

#include <dlfcn.h>

#include <cstdio>
#include <sstream>

#include "common/check.h"

namespace lmi::cuda::emulator {
namespace {

const Dl_info& image() {
  static const Dl_info info = [] {
    Dl_info found;
    LMI_CHECK(dladdr(reinterpret_cast<void*>(&site_of), &found) != 0, "no image");
    return found;
  }();
  return info;
}

}  // namespace

uint32_t site_of(const void* return_address) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(return_address) -
                               static_cast<const uint8_t*>(image().dli_fbase));
}

std::string place_of(uint32_t site) {
  std::ostringstream command;
  command << "addr2line -i -e '" << image().dli_fname << "' 0x" << std::hex << site - 1;
  std::string place;
  if (FILE* output = popen(command.str().c_str(), "r")) {
    for (int c = fgetc(output); c != EOF; c = fgetc(output)) {
      place += c == '\n' ? std::string(" in ") : std::string(1, static_cast<char>(c));
    }
    pclose(output);
  }
  return place.substr(0, place.rfind(" in "));
}

}  // namespace lmi::cuda::emulator
