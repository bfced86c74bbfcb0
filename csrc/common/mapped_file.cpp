#include "common/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "common/aligned_memory.h"
#include "common/check.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

namespace lmi {
namespace {

struct FileDescriptor {
  int value = -1;
  ~FileDescriptor() {
    if (value >= 0) close(value);
  }
};

}  // namespace

MappedFile::MappedFile(const std::string& path, bool huge_pages) : path_(path) {
  // Without waiting, as a FIFO would have it, for the check that refuses it.
  const FileDescriptor file{open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  LMI_CHECK(file.value >= 0, "can't open ", path, ": ", std::strerror(errno));
  struct stat status{};
  LMI_CHECK(fstat(file.value, &status) == 0, "can't read ", path, ": ", std::strerror(errno));
  LMI_CHECK(S_ISREG(status.st_mode), path, " is not a regular file");
  num_bytes_ = status.st_size;
  if (num_bytes_ == 0) return;  // an empty mapping is an error to the operating system
  map(file.value, huge_pages);
  pages_ = std::make_unique<LostPages>(data_, num_bytes_);
}

void MappedFile::map(int descriptor, bool huge_pages) {
  // Addresses that are free, among them aligned ones; those left over go back.
  const int64_t spare = huge_pages ? kHugePage : 0;
  void* reserved = mmap(nullptr, num_bytes_ + spare, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  LMI_CHECK(reserved != MAP_FAILED, "can't map ", path_, ": ", std::strerror(errno));
  auto* start = static_cast<uint8_t*>(reserved);
  const auto address = reinterpret_cast<uintptr_t>(start);
  uint8_t* target = start + (spare == 0 ? 0 : (kHugePage - address % kHugePage) % kHugePage);
  void* memory = mmap(target, num_bytes_, PROT_READ, MAP_PRIVATE | MAP_FIXED, descriptor, 0);
  const int error = errno;
  if (memory == MAP_FAILED) munmap(start, num_bytes_ + spare);
  LMI_CHECK(memory != MAP_FAILED, "can't map ", path_, ": ", std::strerror(error));
  data_ = target;
  if (!huge_pages) return;
  const int64_t page_bytes = sysconf(_SC_PAGESIZE);
  uint8_t* end = data_ + (num_bytes_ + page_bytes - 1) / page_bytes * page_bytes;
  uint8_t* reserved_end = start + (num_bytes_ + spare + page_bytes - 1) / page_bytes * page_bytes;
  if (target > start) munmap(start, target - start);
  if (reserved_end > end) munmap(end, reserved_end - end);
  madvise(data_, num_bytes_, MADV_HUGEPAGE);  // advice: kernels without them refuse it
}

MappedFile::~MappedFile() {
  pages_.reset();
  if (data_ != nullptr) munmap(data_, num_bytes_);
}

const uint8_t* MappedFile::data(int64_t offset, int64_t num_bytes) const {
  LMI_CHECK(
      offset >= 0 && num_bytes >= 0 && num_bytes <= num_bytes_ && offset <= num_bytes_ - num_bytes,
      num_bytes, " bytes at ", offset, " are not in ", path_, " of ", num_bytes_, " bytes");
  return data_ + offset;
}

void MappedFile::populate(int64_t offset, int64_t num_bytes) const {
  advise(offset, num_bytes, MADV_POPULATE_READ);  // kernels before 5.14 don't know it: no harm
}

void MappedFile::drop(int64_t offset, int64_t num_bytes) const {
  advise(offset, num_bytes, MADV_DONTNEED);
}

void MappedFile::advise(int64_t offset, int64_t num_bytes, int advice) const {
  data(offset, num_bytes);
  if (num_bytes == 0) return;
  const int64_t page_bytes = sysconf(_SC_PAGESIZE);
  const int64_t first = offset / page_bytes * page_bytes;
  madvise(data_ + first, offset + num_bytes - first, advice);
}

}  // namespace lmi
