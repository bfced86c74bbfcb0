#include "kv/block_tables.h"

#include <algorithm>

#include "common/check.h"

namespace lmi {

BlockTables::BlockTables(int32_t max_seqs, int32_t max_blocks_per_seq)
    : max_seqs_(max_seqs), max_blocks_per_seq_(max_blocks_per_seq) {
  LMI_CHECK(max_seqs > 0 && max_blocks_per_seq > 0, "max_seqs is ", max_seqs,
            ", max_blocks_per_seq is ", max_blocks_per_seq, ", both must be positive");
  block_ids_.resize(static_cast<size_t>(max_seqs) * max_blocks_per_seq);
  lengths_.resize(max_seqs);
}

void BlockTables::check_row(int32_t row) const {
  LMI_CHECK(row >= 0 && row < max_seqs_, "block table row ", row, " of ", max_seqs_);
}

std::span<const int32_t> BlockTables::row(int32_t row) const {
  check_row(row);
  return {block_ids_.data() + static_cast<int64_t>(row) * max_blocks_per_seq_,
          static_cast<size_t>(lengths_[row])};
}

void BlockTables::set(int32_t row, std::span<const int32_t> block_ids) {
  clear(row);
  append(row, block_ids);
}

void BlockTables::append(int32_t row, std::span<const int32_t> block_ids) {
  check_row(row);
  const int64_t length = lengths_[row] + static_cast<int64_t>(block_ids.size());
  LMI_CHECK(length <= max_blocks_per_seq_, "block table row ", row, " would have ", length,
            " blocks, ", max_blocks_per_seq_, " fit");
  int32_t* target = block_ids_.data() + static_cast<int64_t>(row) * max_blocks_per_seq_;
  std::copy(block_ids.begin(), block_ids.end(), target + lengths_[row]);
  lengths_[row] = static_cast<int32_t>(length);
}

void BlockTables::clear(int32_t row) {
  check_row(row);
  lengths_[row] = 0;
}

}  // namespace lmi
