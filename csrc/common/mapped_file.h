// A read-only memory mapping of a whole file.
#pragma once

#include <cstdint>
#include <string>

namespace lmi {

class MappedFile {
 public:
  // Throws Error with the path and the reason.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  int64_t size() const { return num_bytes_; }
  // The bytes [offset, offset + num_bytes); throws Error unless they lie in the file.
  const uint8_t* data(int64_t offset, int64_t num_bytes) const;
  // Gives the pages of a range back; they are read again when touched again.
  void drop(int64_t offset, int64_t num_bytes) const;

 private:
  std::string path_;
  uint8_t* data_ = nullptr;
  int64_t num_bytes_ = 0;
};

}  // namespace lmi
