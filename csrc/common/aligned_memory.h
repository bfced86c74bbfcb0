// Zeroed memory straight from the operating system: reserved at once, backed by pages on first use.
#pragma once

#include <cstdint>

namespace lmi {

constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kAlignment = 64;  // of what one mapping is cut into: a line of the caches

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

class AlignedMemory {
 public:
  AlignedMemory() = default;
  // Page-aligned; on a 2 MB boundary from that size on. huge_pages asks for transparent huge pages
  // (weights, caches: fewer TLB misses, but memory comes 2 MB at a time). Throws Error with the
  // size when it can't be had.
  explicit AlignedMemory(int64_t num_bytes, bool huge_pages = false);
  ~AlignedMemory();
  AlignedMemory(AlignedMemory&& other) noexcept;
  AlignedMemory& operator=(AlignedMemory&& other) noexcept;

  uint8_t* data() const { return data_; }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  uint8_t* data_ = nullptr;
  int64_t num_bytes_ = 0;  // as asked; the mapping is rounded up to pages
};

}  // namespace lmi
