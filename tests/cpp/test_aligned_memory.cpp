#include <cstdint>
#include <utility>

#include "check.h"
#include "common/aligned_memory.h"

namespace lmi {
namespace {

TEST(aligned_memory_is_zero_and_aligned) {
  for (const int64_t num_bytes : {int64_t{1}, int64_t{4096}, int64_t{5} << 20}) {
    for (const bool huge_pages : {false, true}) {
      const AlignedMemory memory(num_bytes, huge_pages);
      const auto address = reinterpret_cast<uintptr_t>(memory.data());
      EXPECT_EQ(address % (num_bytes >= (2 << 20) ? 2u << 20 : 64u), 0u);
      EXPECT_EQ(memory.num_bytes(), num_bytes);
      EXPECT_EQ(memory.data()[0], 0);
      memory.data()[num_bytes - 1] = 7;
      EXPECT_EQ(memory.data()[num_bytes - 1], 7);
    }
  }
}

TEST(aligned_memory_moves) {
  AlignedMemory first(100);
  first.data()[99] = 3;
  AlignedMemory second(std::move(first));
  EXPECT_EQ(second.data()[99], 3);
  AlignedMemory third;
  third = std::move(second);
  EXPECT_EQ(third.num_bytes(), 100);
  EXPECT_EQ(third.data()[99], 3);
}

TEST(aligned_memory_names_the_size_it_cannot_reserve) {
  EXPECT_ERROR(AlignedMemory(int64_t{1} << 60), "can't reserve 11529215046");
  EXPECT_ERROR(AlignedMemory(-1), "num_bytes is -1");
  EXPECT_EQ(AlignedMemory(0).data(), nullptr);
}

}  // namespace
}  // namespace lmi
