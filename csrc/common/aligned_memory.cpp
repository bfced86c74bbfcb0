#include "common/aligned_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "common/check.h"

namespace lmi {
namespace {

int64_t page_bytes() { return sysconf(_SC_PAGESIZE); }

uint8_t* map(int64_t num_bytes) {
  void* memory = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  LMI_CHECK(memory != MAP_FAILED, "can't reserve ", num_bytes, " bytes: ", std::strerror(errno));
  return static_cast<uint8_t*>(memory);
}

// Maps too much and gives the ends back.
uint8_t* map_on_huge_page_boundary(int64_t num_bytes) {
  uint8_t* start = map(num_bytes + kHugePage);
  uint8_t* end = start + num_bytes + kHugePage;
  auto* aligned = reinterpret_cast<uint8_t*>(
      round_up(static_cast<int64_t>(reinterpret_cast<intptr_t>(start)), kHugePage));
  if (aligned > start) munmap(start, aligned - start);
  if (end > aligned + num_bytes) munmap(aligned + num_bytes, end - (aligned + num_bytes));
  return aligned;
}

}  // namespace

AlignedMemory::AlignedMemory(int64_t num_bytes, bool huge_pages) {
  LMI_CHECK(num_bytes >= 0, "num_bytes is ", num_bytes);
  if (num_bytes == 0) return;
  const int64_t mapped_bytes = round_up(num_bytes, page_bytes());
  data_ = num_bytes < kHugePage ? map(mapped_bytes) : map_on_huge_page_boundary(mapped_bytes);
  num_bytes_ = num_bytes;
  // Advice: a kernel without transparent huge pages refuses it, and nothing is lost.
  madvise(data_, mapped_bytes, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
}

AlignedMemory::~AlignedMemory() {
  if (data_ != nullptr) munmap(data_, round_up(num_bytes_, page_bytes()));
}

AlignedMemory::AlignedMemory(AlignedMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), num_bytes_(std::exchange(other.num_bytes_, 0)) {}

AlignedMemory& AlignedMemory::operator=(AlignedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(num_bytes_, other.num_bytes_);
  return *this;
}

}  // namespace lmi
