#include <algorithm>
#include <cstdint>
#include <vector>

#include "check.h"
#include "common/packed_memory.h"

namespace lmi {
namespace {

TEST(packed_memory_is_zero_aligned_and_apart) {
  std::vector<PackedMemory> slices;
  for (int64_t i = 0; i < 200; ++i) {
    const int64_t num_bytes = i == 50 ? int64_t{20} << 20 : 1 + i * 7919;
    PackedMemory slice(num_bytes);
    EXPECT_EQ(slice.num_bytes(), num_bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(slice.data()) % 64, 0u);
    EXPECT_EQ(std::count(slice.data(), slice.data() + num_bytes, 0), num_bytes);
    std::fill_n(slice.data(), num_bytes, static_cast<uint8_t>(i + 1));
    slices.push_back(slice);
    if (i % 3 == 2) slices.erase(slices.begin() + i / 3);
  }
  for (const PackedMemory& slice : slices) {
    EXPECT_EQ(std::count(slice.data(), slice.data() + slice.num_bytes(), slice.data()[0]),
              slice.num_bytes());
  }
}

TEST(packed_memory_lies_side_by_side) {
  const PackedMemory first(100), second(100);
  EXPECT_EQ(second.data() - first.data(), 128);
}

TEST(packed_memory_names_the_size_it_cannot_reserve) {
  EXPECT_ERROR(PackedMemory(int64_t{1} << 60), "can't reserve 11529215046");
}

TEST(packed_memory_gives_pages_back_while_its_neighbours_stay) {
  constexpr int64_t kBytes = 1 << 20;
  const PackedMemory before(100);
  PackedMemory slice(kBytes);
  const PackedMemory after(100);
  std::fill_n(before.data(), 100, 1);
  std::fill_n(slice.data(), kBytes, 2);
  std::fill_n(after.data(), 100, 3);
  const uint8_t* freed = slice.data();
  PackedMemory copy = slice;
  slice = PackedMemory();
  EXPECT_EQ(freed[kBytes / 2], 2);  // the copy has it still
  copy = PackedMemory();
  EXPECT_EQ(freed[kBytes / 2], 0);  // the mapping is there, its pages are new
  EXPECT_EQ(before.data()[99], 1);
  EXPECT_EQ(after.data()[0], 3);
}

}  // namespace
}  // namespace lmi
