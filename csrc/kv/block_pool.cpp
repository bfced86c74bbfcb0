#include "kv/block_pool.h"

#include <algorithm>

#include "common/check.h"

namespace lmi {
namespace {

int32_t checked_size(const char* what, int32_t value) {
  LMI_CHECK(value >= 1 && value <= (1 << 28), what, " is ", value, ", allowed are 1 to ", 1 << 28);
  return value;
}

}  // namespace

BlockPool::BlockPool(int32_t num_blocks, int32_t block_size, const HashKey& key)
    : num_blocks_(checked_size("num_blocks", num_blocks)),
      block_size_(checked_size("block_size", block_size)),
      key_(key),
      free_head_(num_blocks),
      cached_head_(num_blocks + 1),
      blocks_(num_blocks + 2),
      index_(num_blocks) {
  for (const int32_t head : {free_head_, cached_head_}) {
    blocks_[head].previous = blocks_[head].next = head;
  }
  for (int32_t block_id = 0; block_id < num_blocks; ++block_id) link_before(free_head_, block_id);
  num_free_ = num_blocks;
}

BlockPool::Block& BlockPool::checked(int32_t block_id) {
  LMI_CHECK(block_id >= 0 && block_id < num_blocks_, "block ", block_id, " of ", num_blocks_);
  return blocks_[block_id];
}

void BlockPool::check_used(std::span<const int32_t> block_ids) {
  for (const int32_t block_id : block_ids) {
    LMI_CHECK(checked(block_id).ref_count > 0, "block ", block_id, " is not in use");
  }
}

int32_t BlockPool::ref_count(int32_t block_id) const {
  return const_cast<BlockPool*>(this)->checked(block_id).ref_count;
}

void BlockPool::link_before(int32_t next, int32_t block_id) {
  Block& block = blocks_[block_id];
  block.next = next;
  block.previous = blocks_[next].previous;
  blocks_[block.previous].next = block_id;
  blocks_[next].previous = block_id;
}

void BlockPool::unlink(int32_t block_id) {
  Block& block = blocks_[block_id];
  blocks_[block.previous].next = block.next;
  blocks_[block.next].previous = block.previous;
  block.previous = block.next = -1;
}

std::optional<std::vector<int32_t>> BlockPool::allocate(int32_t num_blocks) {
  LMI_CHECK(num_blocks >= 0, "num_blocks is ", num_blocks);
  if (num_blocks > num_available()) return std::nullopt;
  std::vector<int32_t> block_ids(num_blocks);
  for (int32_t& block_id : block_ids) {
    block_id = num_free_ > 0 ? take_block() : evict();
    blocks_[block_id].ref_count = 1;
  }
  return block_ids;
}

int32_t BlockPool::take_block() {
  const int32_t block_id = blocks_[free_head_].next;
  unlink(block_id);
  num_ever_used_ = std::max(num_ever_used_, block_id + 1);
  --num_free_;
  return block_id;
}

int32_t BlockPool::evict() {
  int32_t block_id = blocks_[cached_head_].next;
  while (evicted_ && !evicted_(block_id, blocks_[block_id].next == cached_head_)) {
    block_id = blocks_[block_id].next;
  }
  unlink(block_id);
  --num_cached_;
  index_.erase(blocks_[block_id].hash);
  blocks_[block_id].is_indexed = false;
  return block_id;
}

void BlockPool::free(std::span<const int32_t> block_ids) {
  check_used(block_ids);
  for (size_t i = block_ids.size(); i-- > 0;) release(block_ids[i]);
}

void BlockPool::release(int32_t block_id) {
  Block& block = blocks_[block_id];
  LMI_CHECK(block.ref_count > 0, "block ", block_id, " is freed more often than it was taken");
  if (--block.ref_count > 0) return;
  if (block.is_indexed) {
    link_before(cached_head_, block_id);
    ++num_cached_;
  } else {
    link_before(blocks_[free_head_].next, block_id);
    ++num_free_;
  }
}

void BlockPool::add_ref(std::span<const int32_t> block_ids) {
  check_used(block_ids);
  for (const int32_t block_id : block_ids) ++blocks_[block_id].ref_count;
}

std::vector<int32_t> BlockPool::acquire_prefix(std::span<const PrefixHash> hashes) {
  std::vector<int32_t> block_ids;
  for (const PrefixHash& hash : hashes) {
    const int32_t block_id = index_.find(hash);
    if (block_id < 0) break;
    if (blocks_[block_id].ref_count++ == 0) {
      unlink(block_id);
      --num_cached_;
    }
    block_ids.push_back(block_id);
  }
  return block_ids;
}

void BlockPool::publish(int32_t block_id, const PrefixHash& hash) {
  check_used({&block_id, 1});
  Block& block = blocks_[block_id];
  if (block.is_indexed) {
    LMI_CHECK(block.hash == hash, "block ", block_id, " is published under another hash already");
    return;
  }
  if (index_.find(hash) >= 0) return;
  index_.insert(hash, block_id);
  block.hash = hash;
  block.is_indexed = true;
}

int32_t BlockPool::clear_cache() {
  const int32_t num_cleared = num_cached_;
  while (num_cached_ > 0) {
    link_before(free_head_, evict());
    ++num_free_;
  }
  return num_cleared;
}

int32_t BlockPool::count_list(int32_t head, bool is_indexed) const {
  int32_t count = 0;
  for (int32_t at = blocks_[head].next; at != head; at = blocks_[at].next) {
    LMI_CHECK(at >= 0 && at < num_blocks_ && count < num_blocks_, "a list runs astray at ", at);
    const Block& block = blocks_[at];
    LMI_CHECK(block.ref_count == 0, "block ", at, " is listed with ", block.ref_count,
              " references");
    LMI_CHECK(block.is_indexed == is_indexed, "block ", at, " is in the wrong list");
    LMI_CHECK(blocks_[block.next].previous == at, "block ", at, " is linked one way only");
    ++count;
  }
  return count;
}

void BlockPool::check_integrity() const {
  LMI_CHECK(count_list(free_head_, false) == num_free_, "num_free is ", num_free_);
  LMI_CHECK(count_list(cached_head_, true) == num_cached_, "num_cached is ", num_cached_);
  int32_t num_used = 0;
  int32_t num_indexed = 0;
  for (int32_t block_id = 0; block_id < num_blocks_; ++block_id) {
    const Block& block = blocks_[block_id];
    LMI_CHECK(block.ref_count >= 0, "block ", block_id, " has ", block.ref_count, " references");
    num_used += block.ref_count > 0;
    num_indexed += block.is_indexed;
    LMI_CHECK(!block.is_indexed || index_.find(block.hash) == block_id, "block ", block_id,
              " isn't what the index finds under its hash");
    LMI_CHECK(block.ref_count == 0 || block.next < 0, "block ", block_id, " is used and listed");
  }
  LMI_CHECK(num_free_ + num_used + num_cached_ == num_blocks_, num_free_, " free, ", num_used,
            " used and ", num_cached_, " cached of ", num_blocks_);
  LMI_CHECK(num_indexed == index_.size(), num_indexed, " blocks are indexed, the index has ",
            index_.size());
}

}  // namespace lmi
