#include "kv/prefix_index.h"

#include <bit>

#include "common/check.h"

namespace lmi {

PrefixIndex::PrefixIndex(int32_t max_entries)
    : entries_(std::bit_ceil(2 * static_cast<size_t>(max_entries) + 1)),
      mask_(entries_.size() - 1) {}

size_t PrefixIndex::locate(const PrefixHash& hash) const {
  size_t at = home(hash);
  while (entries_[at].block_id >= 0 && entries_[at].hash != hash) at = (at + 1) & mask_;
  return at;
}

int32_t PrefixIndex::find(const PrefixHash& hash) const { return entries_[locate(hash)].block_id; }

void PrefixIndex::insert(const PrefixHash& hash, int32_t block_id) {
  Entry& entry = entries_[locate(hash)];
  LMI_CHECK(entry.block_id < 0, "the hash of block ", block_id, " is indexed already");
  LMI_CHECK(2 * static_cast<size_t>(size_) < entries_.size(), "the prefix index is full");
  entry = {hash, block_id};
  ++size_;
}

void PrefixIndex::erase(const PrefixHash& hash) {
  size_t hole = locate(hash);
  LMI_CHECK(entries_[hole].block_id >= 0, "the hash is not indexed");
  // Entries after the hole that don't sit at home move up, so that no probe meets a gap.
  for (size_t at = (hole + 1) & mask_; entries_[at].block_id >= 0; at = (at + 1) & mask_) {
    const size_t distance_from_home = (at - home(entries_[at].hash)) & mask_;
    const size_t distance_from_hole = (at - hole) & mask_;
    if (distance_from_home >= distance_from_hole) {
      entries_[hole] = entries_[at];
      hole = at;
    }
  }
  entries_[hole].block_id = -1;
  --size_;
}

}  // namespace lmi
