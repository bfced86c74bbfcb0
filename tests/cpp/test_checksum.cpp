#include "common/checksum.h"

#include <set>

#include "check.h"

namespace lmi {
namespace {

std::vector<uint8_t> bytes(int64_t count) {
  std::vector<uint8_t> result(count);
  for (int64_t i = 0; i < count; ++i) result[i] = static_cast<uint8_t>(i * 7 + i / 251);
  return result;
}

TEST(checksum_sees_every_flipped_bit) {
  std::vector<uint8_t> data = bytes(200);
  std::set<uint64_t> sums{checksum(data.data(), 200)};
  for (int bit = 0; bit < 1600; ++bit) {
    data[bit / 8] ^= 1 << bit % 8;
    sums.insert(checksum(data.data(), 200));
    data[bit / 8] ^= 1 << bit % 8;
  }
  EXPECT_EQ(sums.size(), size_t{1601});
}

TEST(checksum_sees_lengths_of_zeros_and_the_order_of_pieces) {
  std::vector<uint8_t> data(3 * kChecksumPieceBytes);
  std::set<uint64_t> sums;
  for (int64_t count = 0; count < 200; ++count) sums.insert(checksum(data.data(), count));
  EXPECT_EQ(sums.size(), size_t{200});
  data[0] = 1;
  const uint64_t first = checksum(data.data(), data.size());
  std::swap(data[0], data[kChecksumPieceBytes]);
  EXPECT(first != checksum(data.data(), data.size()));
}

TEST(checksum_of_an_array_combines_those_of_its_pieces) {
  const std::vector<uint8_t> data = bytes(kChecksumPieceBytes + 5);
  const uint64_t first = piece_checksum(data.data(), kChecksumPieceBytes);
  const uint64_t second = piece_checksum(data.data() + kChecksumPieceBytes, 5);
  EXPECT_EQ(checksum(data.data(), data.size()), combine_checksums({first, second}));
}

}  // namespace
}  // namespace lmi
