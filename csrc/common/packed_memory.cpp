#include "common/packed_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <mutex>

namespace lmi {

namespace {

// Address space, not memory: pages come when they are touched.
constexpr int64_t kMappingBytes = int64_t{64} << 20;

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

// The pages that lie in the slice alone; those at its ends are its neighbours' too. The addresses
// aren't used again: models come and go beside one that stays, and would else fill mapping after
// mapping with what is left of them.
void give_back(uint8_t* data, int64_t num_bytes) {
  const int64_t page_bytes = sysconf(_SC_PAGESIZE);
  const auto begin = round_up(static_cast<int64_t>(reinterpret_cast<intptr_t>(data)), page_bytes);
  const auto end =
      static_cast<int64_t>(reinterpret_cast<intptr_t>(data + num_bytes)) / page_bytes * page_bytes;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

}  // namespace

PackedMemory::PackedMemory(int64_t num_bytes) : num_bytes_(num_bytes) {
  if (num_bytes > kMappingBytes / 4) {
    auto own = std::make_shared<AlignedMemory>(round_up(num_bytes, kHugePage), true);
    data_ = own->data();
    slice_ = std::move(own);
    return;
  }
  Cutter& source = cutter();
  const std::lock_guard lock(source.mutex);
  auto mapping = source.mapping.lock();
  if (mapping == nullptr || source.num_used_bytes + num_bytes > kMappingBytes) {
    mapping = std::make_shared<AlignedMemory>(kMappingBytes, true);
    source.mapping = mapping;
    source.num_used_bytes = 0;
  }
  data_ = mapping->data() + source.num_used_bytes;
  source.num_used_bytes += round_up(num_bytes, kAlignment);
  slice_ = std::shared_ptr<void>(data_, [mapping, num_bytes](void* data) {
    give_back(static_cast<uint8_t*>(data), num_bytes);
  });
}

}  // namespace lmi
