#include "cuda/fragment.h"

#include <set>
#include <utility>

#include "check.h"

namespace lmi::cuda {
namespace {

TEST(fragments_hold_every_element_once) {
  std::set<std::pair<int, int>> a, b, c;
  for (int lane = 0; lane < 32; ++lane) {
    for (int half = 0; half < 2; ++half) {
      for (int index = 0; index < 4; ++index) {
        const Element at = fragment_a(lane, index, half);
        EXPECT(at.row < 16 && at.column < 16);
        a.insert({at.row, at.column});
      }
      for (int index = 0; index < 2; ++index) {
        const Element at = fragment_b(lane, index, half);
        EXPECT(at.row < 16 && at.column < 8);
        b.insert({at.row, at.column});
      }
    }
    for (int index = 0; index < 4; ++index) {
      const Element at = fragment_c(lane, index);
      EXPECT(at.row < 16 && at.column < 8);
      c.insert({at.row, at.column});
    }
  }
  EXPECT_EQ(a.size(), 256u);
  EXPECT_EQ(b.size(), 128u);
  EXPECT_EQ(c.size(), 128u);
}

// Elements a0 .. a7, b0 .. b3 and c0 .. c3 of lane 13 as the figures of the PTX ISA show them.
TEST(fragments_are_those_of_the_instruction) {
  const std::pair<int, int> a[] = {{3, 2},  {3, 3},  {11, 2},  {11, 3},
                                   {3, 10}, {3, 11}, {11, 10}, {11, 11}};
  for (int i = 0; i < 8; ++i) {
    const Element at = fragment_a(13, i / 2, i % 2);
    EXPECT_EQ(at.row, a[i].first);
    EXPECT_EQ(at.column, a[i].second);
  }
  const std::pair<int, int> b[] = {{2, 3}, {3, 3}, {10, 3}, {11, 3}};
  const std::pair<int, int> c[] = {{3, 2}, {3, 3}, {11, 2}, {11, 3}};
  for (int i = 0; i < 4; ++i) {
    const Element in_b = fragment_b(13, i / 2, i % 2);
    EXPECT_EQ(in_b.row, b[i].first);
    EXPECT_EQ(in_b.column, b[i].second);
    const Element in_c = fragment_c(13, i);
    EXPECT_EQ(in_c.row, c[i].first);
    EXPECT_EQ(in_c.column, c[i].second);
  }
}

TEST(fragments_of_bytes_hold_every_element_once) {
  std::set<std::pair<int, int>> a, b;
  for (int lane = 0; lane < 32; ++lane) {
    for (int byte = 0; byte < 4; ++byte) {
      for (int index = 0; index < 4; ++index) {
        const Element at = byte_fragment_a(lane, index, byte);
        EXPECT(at.row < 16 && at.column < 32);
        a.insert({at.row, at.column});
      }
      for (int index = 0; index < 2; ++index) {
        const Element at = byte_fragment_b(lane, index, byte);
        EXPECT(at.row < 32 && at.column < 8);
        b.insert({at.row, at.column});
      }
    }
  }
  EXPECT_EQ(a.size(), 512u);
  EXPECT_EQ(b.size(), 256u);
}

// Elements a0, a4, a8, a15, b1 and b7 of lane 13, again as the figures show them.
TEST(fragments_of_bytes_are_those_of_the_instruction) {
  const auto expect = [](Element at, int row, int column) {
    EXPECT_EQ(at.row, row);
    EXPECT_EQ(at.column, column);
  };
  expect(byte_fragment_a(13, 0, 0), 3, 4);
  expect(byte_fragment_a(13, 1, 0), 11, 4);
  expect(byte_fragment_a(13, 2, 0), 3, 20);
  expect(byte_fragment_a(13, 3, 3), 11, 23);
  expect(byte_fragment_b(13, 0, 1), 5, 3);
  expect(byte_fragment_b(13, 1, 3), 23, 3);
}

}  // namespace
}  // namespace lmi::cuda
