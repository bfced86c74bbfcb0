#include "common/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "common/check.h"

namespace lmi {
namespace {

struct FileDescriptor {
  int value = -1;
  ~FileDescriptor() {
    if (value >= 0) close(value);
  }
};

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const FileDescriptor file{open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  LMI_CHECK(file.value >= 0, "can't open ", path, ": ", std::strerror(errno));
  struct stat status{};
  LMI_CHECK(fstat(file.value, &status) == 0, "can't read ", path, ": ", std::strerror(errno));
  LMI_CHECK(S_ISREG(status.st_mode), path, " is not a regular file");
  num_bytes_ = status.st_size;
  if (num_bytes_ == 0) return;  // an empty mapping is an error to the operating system
  void* memory = mmap(nullptr, num_bytes_, PROT_READ, MAP_PRIVATE, file.value, 0);
  LMI_CHECK(memory != MAP_FAILED, "can't map ", path, ": ", std::strerror(errno));
  data_ = static_cast<uint8_t*>(memory);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(data_, num_bytes_);
}

const uint8_t* MappedFile::data(int64_t offset, int64_t num_bytes) const {
  LMI_CHECK(
      offset >= 0 && num_bytes >= 0 && num_bytes <= num_bytes_ && offset <= num_bytes_ - num_bytes,
      num_bytes, " bytes at ", offset, " are not in ", path_, " of ", num_bytes_, " bytes");
  return data_ + offset;
}

void MappedFile::drop(int64_t offset, int64_t num_bytes) const {
  data(offset, num_bytes);
  if (num_bytes == 0) return;
  const int64_t page_bytes = sysconf(_SC_PAGESIZE);
  const int64_t first = offset / page_bytes * page_bytes;
  madvise(data_ + first, offset + num_bytes - first, MADV_DONTNEED);
}

}  // namespace lmi
