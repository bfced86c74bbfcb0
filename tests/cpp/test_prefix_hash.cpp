#include "kv/prefix_hash.h"

#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "check.h"
#include "kv/prefix_index.h"

namespace lmi {
namespace {

std::string hex(const PrefixHash& hash) {
  std::string text;
  for (const char byte : prefix_hash_to_bytes(hash)) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(byte));
    text += digits;
  }
  return text;
}

// Key 00 01 .. 0f, message 00 01 .. length - 1: the published vectors of the 128-bit variant.
TEST(siphash_128_gives_the_published_vectors) {
  std::string key_bytes(16, '\0');
  std::iota(key_bytes.begin(), key_bytes.end(), '\0');
  const HashKey key = hash_key_from_bytes(key_bytes);
  const struct {
    size_t length;
    const char* expected;
  } vectors[] = {
      {0, "a3817f04ba25a8e66df67214c7550293"},  {1, "da87c1d86b99af44347659119b22fc45"},
      {2, "8177228da4a45dc7fca38bdef60affe4"},  {3, "9c70b60c5267a94e5f33b6b02985ed51"},
      {15, "5493e99933b0a8117e08ec0f97cfc3d9"},
  };
  for (const auto& vector : vectors) {
    std::vector<uint8_t> message(vector.length);
    std::iota(message.begin(), message.end(), uint8_t{0});
    EXPECT_EQ(hex(siphash_128(key, message)), std::string(vector.expected));
  }
}

TEST(hash_blocks_names_the_whole_prefix) {
  const HashKey key{1, 2};
  const PrefixHash seed = chain_seed(key, "");
  const std::vector<int32_t> ids{1, 2, 3, 4, 5, 6, 7};
  const auto hashes = hash_blocks(key, seed, ids, 3);
  EXPECT_EQ(hashes.size(), 2u);

  // The same blocks one at a time, each with its parent.
  const std::span<const int32_t> all(ids);
  const auto first = hash_blocks(key, seed, all.subspan(0, 3), 3);
  const auto second = hash_blocks(key, first[0], all.subspan(3, 3), 3);
  EXPECT(first[0] == hashes[0] && second[0] == hashes[1]);

  // Another token early, another seed or another key changes every later hash.
  const std::vector<int32_t> other_ids{9, 2, 3, 4, 5, 6};
  EXPECT(hash_blocks(key, seed, other_ids, 3)[1] != hashes[1]);
  EXPECT(hash_blocks(key, chain_seed(key, "adapter"), ids, 3)[1] != hashes[1]);
  EXPECT(hash_blocks({1, 3}, seed, ids, 3)[1] != hashes[1]);
  EXPECT(hash_blocks(key, seed, all.subspan(0, 2), 3).empty());
}

TEST(chain_seed_cannot_stand_for_a_block) {
  const HashKey key{5, 6};
  const PrefixHash parent = chain_seed(key, "");
  const std::vector<int32_t> ids{1, 2, 3, 4};
  std::string block_message(kPrefixHashBytes + sizeof(int32_t) * ids.size(), '\0');
  const auto parent_bytes = prefix_hash_to_bytes(parent);
  std::copy(parent_bytes.begin(), parent_bytes.end(), block_message.begin());
  for (size_t i = 0; i < ids.size(); ++i) block_message[kPrefixHashBytes + 4 * i] = char(ids[i]);
  EXPECT(chain_seed(key, block_message) != hash_blocks(key, parent, ids, 4)[0]);
}

TEST(prefix_hash_refuses_other_sizes) {
  EXPECT_ERROR(prefix_hash_from_bytes("short"), "16 bytes, not 5");
}

// Hashes that all want the same few places: probing and moving up must keep every entry findable.
TEST(prefix_index_keeps_colliding_entries_findable) {
  constexpr int32_t kNumEntries = 40;
  PrefixIndex index(kNumEntries);
  const auto hash = [](int32_t id) {
    return PrefixHash{static_cast<uint64_t>(id % 3) + 126, static_cast<uint64_t>(id)};
  };
  for (int32_t id = 0; id < kNumEntries; ++id) index.insert(hash(id), id);
  for (int32_t removed = 0; removed < kNumEntries; ++removed) {
    const int32_t victim = (removed * 7) % kNumEntries;
    index.erase(hash(victim));
    EXPECT_EQ(index.find(hash(victim)), -1);
    for (int32_t later = removed + 1; later < kNumEntries; ++later) {
      const int32_t id = (later * 7) % kNumEntries;
      EXPECT_EQ(index.find(hash(id)), id);
    }
  }
  EXPECT_EQ(index.size(), 0);
  EXPECT_ERROR(index.erase(hash(1)), "not indexed");
}

}  // namespace
}  // namespace lmi
