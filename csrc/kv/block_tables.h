// Block tables of the running sequences: which KV block holds which of their tokens.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace lmi {

class BlockTables {
 public:
  BlockTables(int32_t max_seqs, int32_t max_blocks_per_seq);

  int32_t max_seqs() const { return max_seqs_; }
  int32_t max_blocks_per_seq() const { return max_blocks_per_seq_; }
  // [max_seqs, max_blocks_per_seq]; never moves. Entries beyond a row's length are stale.
  const int32_t* data() const { return block_ids_.data(); }

  std::span<const int32_t> row(int32_t row) const;
  void set(int32_t row, std::span<const int32_t> block_ids);
  void append(int32_t row, std::span<const int32_t> block_ids);
  void clear(int32_t row);

 private:
  void check_row(int32_t row) const;

  const int32_t max_seqs_;
  const int32_t max_blocks_per_seq_;
  std::vector<int32_t> block_ids_;
  std::vector<int32_t> lengths_;
};

}  // namespace lmi
