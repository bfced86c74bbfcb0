// Memory for many arrays of odd sizes that are read from end to end again and again: weights.
#pragma once

#include <cstdint>
#include <memory>

#include "common/aligned_memory.h"

namespace lmi {

// A 64-byte aligned slice of a large mapping on huge pages that it shares with its neighbours, so
// that an array smaller than a huge page, and the end of a larger one, lie on huge pages too:
// hardware prefetchers stop at page boundaries. Zeroed. A slice's own pages go with it, the mapping
// with its last slice.
class PackedMemory {
 public:
  PackedMemory() = default;
  // Throws Error with the size when it can't be had. From any thread.
  explicit PackedMemory(int64_t num_bytes);

  uint8_t* data() const { return data_; }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  std::shared_ptr<void> slice_;  // keeps the mapping
  uint8_t* data_ = nullptr;
  int64_t num_bytes_ = 0;
};

}  // namespace lmi
