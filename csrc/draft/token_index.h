// Tokens of texts, one text behind the other, found again by the few tokens before them.
//
// A hash table has the last position behind each such key, and a chain leads from there to earlier
// ones. Positions count all tokens ever added; when the index is full, its older half is forgotten.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace lmi {

class TokenIndex {
 public:
  static constexpr int32_t kTextEnd = -1;

  // 16 bytes a token at most, allocated as texts grow.
  TokenIndex(int64_t max_tokens, int32_t num_key_tokens);

  void append(std::span<const int32_t> token_ids);
  void end_text() { add(kTextEnd); }

  // Positions that can be read; kTextEnd between two texts.
  int64_t begin() const { return first_; }
  int64_t end() const { return first_ + static_cast<int64_t>(tokens_.size()); }
  int32_t at(int64_t position) const { return tokens_[static_cast<size_t>(position - first_)]; }
  // As many of the last tokens, or fewer.
  std::span<const int32_t> last(int64_t count) const {
    return std::span(tokens_).last(std::min(tokens_.size(), static_cast<size_t>(count)));
  }

  // The last position behind tokens whose hash is that of `key`; -1: there is none.
  int64_t find(std::span<const int32_t> key) const;
  // The one before it.
  int64_t find_before(int64_t position) const;

 private:
  void add(int32_t token_id);
  void link(int64_t index);
  void rebuild();
  size_t home(const int32_t* key) const;

  const int64_t max_tokens_;
  const int32_t num_key_tokens_;
  int64_t first_ = 0;
  std::vector<int32_t> tokens_;
  std::vector<int32_t> earlier_;  // per token: index of an earlier one behind the same hash, or -1
  std::vector<int32_t> heads_;    // a power of two; index, or -1
};

}  // namespace lmi
