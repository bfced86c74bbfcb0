#include "common/packed_memory.h"

#include <mutex>

namespace lmi {

namespace {

// Address space, not memory: pages come when they are touched.
constexpr int64_t kMappingBytes = int64_t{64} << 20;
constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kAlignment = 64;

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// The mapping that the next slice is cut from.
struct Cutter {
  std::mutex mutex;
  std::weak_ptr<AlignedMemory> mapping;
  int64_t num_used_bytes = 0;
};

Cutter& cutter() {
  static Cutter instance;
  return instance;
}

}  // namespace

PackedMemory::PackedMemory(int64_t num_bytes) : num_bytes_(num_bytes) {
  if (num_bytes > kMappingBytes / 4) {
    mapping_ = std::make_shared<AlignedMemory>(round_up(num_bytes, kHugePage), true);
    data_ = mapping_->data();
    return;
  }
  Cutter& source = cutter();
  const std::lock_guard lock(source.mutex);
  mapping_ = source.mapping.lock();
  if (mapping_ == nullptr || source.num_used_bytes + num_bytes > kMappingBytes) {
    mapping_ = std::make_shared<AlignedMemory>(kMappingBytes, true);
    source.mapping = mapping_;
    source.num_used_bytes = 0;
  }
  data_ = mapping_->data() + source.num_used_bytes;
  source.num_used_bytes += round_up(num_bytes, kAlignment);
}

}  // namespace lmi
