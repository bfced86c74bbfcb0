// Hash table from prefix hashes to block ids: open addressing, fixed capacity, no allocation.
#pragma once

#include <cstdint>
#include <vector>

#include "kv/prefix_hash.h"

namespace lmi {

class PrefixIndex {
 public:
  explicit PrefixIndex(int32_t max_entries);

  int32_t size() const { return size_; }
  // The block id, or -1.
  int32_t find(const PrefixHash& hash) const;
  // The hash must not be present, and there must be room.
  void insert(const PrefixHash& hash, int32_t block_id);
  // The hash must be present.
  void erase(const PrefixHash& hash);

 private:
  struct Entry {
    PrefixHash hash;
    int32_t block_id = -1;  // -1: empty
  };

  // Hashes are uniform already; any of their bits will do.
  size_t home(const PrefixHash& hash) const { return hash.low & mask_; }
  // The entry with the hash, or the empty one where it would go.
  size_t locate(const PrefixHash& hash) const;

  std::vector<Entry> entries_;
  size_t mask_;
  int32_t size_ = 0;
};

}  // namespace lmi
