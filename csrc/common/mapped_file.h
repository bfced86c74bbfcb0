// A read-only memory mapping of a whole file. Where the file is truncated later, zeros are read.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "common/lost_pages.h"

namespace lmi {

class MappedFile {
 public:
  // huge_pages: the mapping lies so that the file's pages in memory can be mapped 2 MB at a time,
  // where they are that large; they are if the file was written, or is read now, in such pieces.
  // Throws Error with the path and the reason.
  explicit MappedFile(const std::string& path, bool huge_pages = false);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  int64_t size() const { return num_bytes_; }
  // Whether something was read that the file doesn't have any more.
  bool is_lost() const { return pages_ != nullptr && pages_->is_lost(); }
  // The bytes [offset, offset + num_bytes); throws Error unless they lie in the file.
  const uint8_t* data(int64_t offset, int64_t num_bytes) const;
  // Maps the pages of a range at once, which is much faster than one by one when they are touched.
  void populate(int64_t offset, int64_t num_bytes) const;
  // Gives the pages of a range back; they are read again when touched again.
  void drop(int64_t offset, int64_t num_bytes) const;

 private:
  void map(int descriptor, bool huge_pages);
  void advise(int64_t offset, int64_t num_bytes, int advice) const;

  std::string path_;
  uint8_t* data_ = nullptr;
  int64_t num_bytes_ = 0;
  std::unique_ptr<LostPages> pages_;
};

}  // namespace lmi
