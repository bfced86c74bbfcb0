#include "kv/block_pool.h"

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "check.h"
#include "kv/block_tables.h"

namespace lmi {
namespace {

constexpr HashKey kKey{11, 22};
using Ids = std::vector<int32_t>;

bool equal(std::span<const int32_t> left, const Ids& right) {
  return std::equal(left.begin(), left.end(), right.begin(), right.end());
}

std::vector<PrefixHash> chain(int32_t num_blocks, int32_t first_token = 0) {
  Ids ids(num_blocks * 2);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = first_token + static_cast<int32_t>(i);
  return hash_blocks(kKey, chain_seed(kKey, ""), ids, 2);
}

void publish_all(BlockPool& pool, const Ids& block_ids, const std::vector<PrefixHash>& hashes) {
  for (size_t i = 0; i < block_ids.size(); ++i) pool.publish(block_ids[i], hashes[i]);
}

TEST(block_pool_allocates_all_or_nothing) {
  BlockPool pool(4, 2, kKey);
  EXPECT(equal(*pool.allocate(3), {0, 1, 2}));
  EXPECT(!pool.allocate(2).has_value());
  EXPECT_EQ(pool.num_free(), 1);
  EXPECT_EQ(pool.num_used(), 3);
  EXPECT(pool.allocate(0)->empty());
  pool.check_integrity();
}

TEST(block_pool_counts_references) {
  BlockPool pool(2, 2, kKey);
  const Ids ids = *pool.allocate(1);
  pool.add_ref(ids);
  pool.free(ids);
  EXPECT_EQ(pool.ref_count(ids[0]), 1);
  EXPECT_EQ(pool.num_used(), 1);
  pool.free(ids);
  EXPECT_EQ(pool.num_free(), 2);
  EXPECT_ERROR(pool.free(ids), "block 0 is not in use");
  EXPECT_ERROR(pool.add_ref(ids), "block 0 is not in use");
  EXPECT_ERROR(pool.free(Ids{2}), "block 2 of 2");
  pool.check_integrity();
}

TEST(block_pool_hits_freed_blocks_until_they_are_evicted) {
  BlockPool pool(4, 2, kKey);
  const auto hashes = chain(3);
  const Ids ids = *pool.allocate(3);
  publish_all(pool, ids, hashes);
  pool.free(ids);
  EXPECT_EQ(pool.num_cached(), 3);
  EXPECT_EQ(pool.num_available(), 4);
  EXPECT(pool.acquire_prefix(hashes) == ids);
  pool.free(ids);

  // The uncached block goes first, then the tail of the chain: its head stays hit-able.
  EXPECT(equal(*pool.allocate(2), {3, ids[2]}));
  EXPECT(equal(pool.acquire_prefix(hashes), {ids[0], ids[1]}));
  pool.check_integrity();
}

TEST(block_pool_evicts_the_least_recent_chain_first) {
  BlockPool pool(4, 2, kKey);
  const auto old_hashes = chain(2);
  const auto new_hashes = chain(2, 100);
  const Ids first = *pool.allocate(2);
  const Ids second = *pool.allocate(2);
  publish_all(pool, first, old_hashes);
  publish_all(pool, second, new_hashes);
  pool.free(first);
  pool.free(second);
  pool.free(pool.acquire_prefix(old_hashes));  // used again: the more recent one now
  EXPECT(equal(*pool.allocate(2), {second[1], second[0]}));
  EXPECT(pool.acquire_prefix(old_hashes) == first);
  pool.check_integrity();
}

TEST(block_pool_leaves_duplicates_private) {
  BlockPool pool(4, 2, kKey);
  const auto hashes = chain(1);
  const Ids first = *pool.allocate(1);
  const Ids second = *pool.allocate(1);
  pool.publish(first[0], hashes[0]);
  pool.publish(first[0], hashes[0]);
  pool.publish(second[0], hashes[0]);
  EXPECT(pool.acquire_prefix(hashes) == first);
  pool.free(second);
  EXPECT_EQ(pool.num_cached(), 0);
  EXPECT_EQ(pool.num_free(), 3);
  EXPECT_ERROR(pool.publish(first[0], chain(1, 50)[0]), "under another hash");
  EXPECT_ERROR(pool.publish(second[0], hashes[0]), "not in use");
  pool.check_integrity();
}

TEST(block_pool_clears_only_what_nobody_uses) {
  BlockPool pool(3, 2, kKey);
  const auto hashes = chain(2);
  const Ids ids = *pool.allocate(2);
  publish_all(pool, ids, hashes);
  pool.free(ids);
  const Ids held = pool.acquire_prefix(std::span(hashes).first(1));
  EXPECT_EQ(pool.clear_cache(), 1);
  EXPECT_EQ(pool.num_cached(), 0);
  EXPECT(pool.acquire_prefix(hashes) == held);
  pool.check_integrity();
}

TEST(block_pool_refuses_bad_sizes) {
  EXPECT_ERROR(BlockPool(0, 2, kKey), "num_blocks is 0");
  EXPECT_ERROR(BlockPool(2, -1, kKey), "block_size is -1");
  BlockPool pool(2, 2, kKey);
  EXPECT_ERROR(pool.allocate(-1), "num_blocks is -1");
}

// Sequences that start, share prefixes, fork, grow and end at random; the pool must stay whole and
// agree with what the sequences hold.
TEST(block_pool_stays_whole_under_a_random_history) {
  std::mt19937 random(7);
  const auto below = [&random](size_t bound) { return static_cast<int32_t>(random() % bound); };
  constexpr int32_t kNumBlocks = 24;
  BlockPool pool(kNumBlocks, 2, kKey);
  std::vector<Ids> tables;
  std::map<int32_t, PrefixHash> contents;  // what was last published under each block id
  for (int step = 0; step < 20000; ++step) {
    const int32_t action = below(4);
    if (action <= 1) {
      const auto hashes = chain(1 + below(6), 10 * below(5));
      Ids table = pool.acquire_prefix(hashes);
      for (size_t i = 0; i < table.size(); ++i) EXPECT(contents.at(table[i]) == hashes[i]);
      const size_t num_hit = table.size();
      const auto fresh = pool.allocate(static_cast<int32_t>(hashes.size() - num_hit));
      if (!fresh) {
        EXPECT(static_cast<size_t>(pool.num_available()) < hashes.size() - num_hit);
        pool.free(table);
        continue;
      }
      table.insert(table.end(), fresh->begin(), fresh->end());
      for (size_t i = num_hit; i < table.size(); ++i) {
        contents[table[i]] = hashes[i];
        pool.publish(table[i], hashes[i]);
      }
      tables.push_back(table);
    } else if (action == 2 && !tables.empty()) {
      const Ids fork = tables[below(tables.size())];
      pool.add_ref(fork);
      tables.push_back(fork);
    } else if (!tables.empty()) {
      const int32_t victim = below(tables.size());
      pool.free(tables[victim]);
      tables.erase(tables.begin() + victim);
    }
    std::vector<int32_t> references(kNumBlocks);
    for (const Ids& table : tables) {
      for (const int32_t id : table) ++references[id];
    }
    for (int32_t id = 0; id < kNumBlocks; ++id) EXPECT_EQ(pool.ref_count(id), references[id]);
    pool.check_integrity();
  }
}

TEST(block_tables_keep_rows) {
  BlockTables tables(2, 3);
  tables.set(1, Ids{7, 8});
  tables.append(1, Ids{9});
  EXPECT(equal(tables.row(1), {7, 8, 9}));
  EXPECT(tables.row(0).empty());
  EXPECT_EQ(tables.data()[3], 7);
  EXPECT_ERROR(tables.append(1, Ids{1}), "would have 4 blocks, 3 fit");
  tables.set(1, Ids{5});
  EXPECT(equal(tables.row(1), {5}));
  tables.clear(1);
  EXPECT(tables.row(1).empty());
  EXPECT_ERROR(tables.row(2), "row 2 of 2");
  EXPECT_ERROR(BlockTables(0, 1), "must be positive");
}

}  // namespace
}  // namespace lmi
