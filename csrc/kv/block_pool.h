// Who owns which KV block, and which prefix each one holds. Bookkeeping only: no KV memory here.
//
// A block is free (nobody's, content worthless), used (references > 0) or cached (no reference,
// content still hit-able under its prefix hash). Allocation takes free blocks first and then evicts
// cached ones, least recently freed first. Everything is O(1) per block.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kv/prefix_hash.h"
#include "kv/prefix_index.h"

namespace lmi {

class BlockPool {
 public:
  BlockPool(int32_t num_blocks, int32_t block_size, const HashKey& key);

  int32_t num_blocks() const { return num_blocks_; }
  int32_t block_size() const { return block_size_; }
  const HashKey& hash_key() const { return key_; }
  int32_t num_free() const { return num_free_; }
  int32_t num_cached() const { return num_cached_; }
  int32_t num_available() const { return num_free_ + num_cached_; }
  int32_t num_used() const { return num_blocks_ - num_available(); }
  // Blocks below this one are used or were: never used ones are handed out in ascending order.
  int32_t num_ever_used() const { return num_ever_used_; }
  int32_t ref_count(int32_t block_id) const;

  // New blocks with one reference each; nothing happens when there are too few.
  std::optional<std::vector<int32_t>> allocate(int32_t num_blocks);
  // Drops a reference of each block of a table, the last one first: of one prefix the tail becomes
  // the older one, and is evicted before the head that makes it reachable.
  void free(std::span<const int32_t> block_ids);
  // One more reference of each; the blocks must be used.
  void add_ref(std::span<const int32_t> block_ids);
  // The block that is hit-able under a hash, or -1.
  int32_t find(const PrefixHash& hash) const { return index_.find(hash); }
  // The blocks of the longest indexed prefix, one reference taken of each.
  std::vector<int32_t> acquire_prefix(std::span<const PrefixHash> hashes);
  // Makes a used block hit-able. Where another block holds the same prefix already, this one stays
  // private.
  void publish(int32_t block_id, const PrefixHash& hash);
  // Who is asked for each cached block before it loses its content: false, and the next one goes in
  // its place. is_last: there is no next one, and true is what is answered. Empty: nobody.
  using Evicted = std::function<bool(int32_t block_id, bool is_last)>;
  void on_evict(Evicted evicted) { evicted_ = std::move(evicted); }
  // Cached blocks become free; returns how many.
  int32_t clear_cache();
  // Throws Error unless counts, lists, references and index agree.
  void check_integrity() const;

 private:
  struct Block {
    PrefixHash hash;  // meaningful while is_indexed
    int32_t ref_count = 0;
    int32_t previous = -1;  // neighbours in the free or the cached list
    int32_t next = -1;
    bool is_indexed = false;
  };

  Block& checked(int32_t block_id);
  void check_used(std::span<const int32_t> block_ids);
  void link_before(int32_t next, int32_t block_id);
  void unlink(int32_t block_id);
  int32_t take_block();
  int32_t evict();
  void release(int32_t block_id);
  int32_t count_list(int32_t head, bool is_indexed) const;

  const int32_t num_blocks_;
  const int32_t block_size_;
  const HashKey key_;
  // Two list heads follow the blocks, so that linking needs no special cases.
  const int32_t free_head_;    // first: the one freed last
  const int32_t cached_head_;  // first: the least recent
  std::vector<Block> blocks_;
  PrefixIndex index_;
  Evicted evicted_;
  int32_t num_free_ = 0;
  int32_t num_ever_used_ = 0;
  int32_t num_cached_ = 0;
};

}  // namespace lmi
