#include "draft/token_index.h"

#include <algorithm>
#include <limits>

#include "common/check.h"

namespace lmi {
namespace {

constexpr size_t kMinHeads = 256;

}  // namespace

TokenIndex::TokenIndex(int64_t max_tokens, int32_t num_key_tokens)
    : max_tokens_(max_tokens), num_key_tokens_(num_key_tokens), heads_(kMinHeads, -1) {
  LMI_CHECK(max_tokens > 1 && max_tokens <= std::numeric_limits<int32_t>::max(), "max_tokens ",
            max_tokens);
  LMI_CHECK(num_key_tokens > 0, "num_key_tokens ", num_key_tokens);
}

void TokenIndex::append(std::span<const int32_t> token_ids) {
  for (const int32_t id : token_ids) add(id);
}

int64_t TokenIndex::find(std::span<const int32_t> key) const {
  LMI_CHECK(std::ssize(key) == num_key_tokens_, "a key of ", key.size(), " tokens");
  const int32_t index = heads_[home(key.data())];
  return index < 0 ? -1 : first_ + index;
}

int64_t TokenIndex::find_before(int64_t position) const {
  const int32_t index = earlier_[static_cast<size_t>(position - first_)];
  return index < 0 ? -1 : first_ + index;
}

void TokenIndex::add(int32_t token_id) {
  if (std::ssize(tokens_) == max_tokens_) {
    const int64_t num_forgotten = max_tokens_ / 2;
    tokens_.erase(tokens_.begin(), tokens_.begin() + num_forgotten);
    first_ += num_forgotten;
    rebuild();
  }
  tokens_.push_back(token_id);
  earlier_.push_back(-1);
  if (tokens_.size() > heads_.size()) {
    heads_.resize(2 * heads_.size());
    rebuild();
  } else {
    link(std::ssize(tokens_) - 1);
  }
}

void TokenIndex::rebuild() {
  std::fill(heads_.begin(), heads_.end(), -1);
  earlier_.assign(tokens_.size(), -1);
  for (int64_t i = 0; i < std::ssize(tokens_); ++i) link(i);
}

void TokenIndex::link(int64_t index) {
  if (index < num_key_tokens_ || tokens_[static_cast<size_t>(index)] == kTextEnd) return;
  const int32_t* key = tokens_.data() + index - num_key_tokens_;
  if (std::find(key, key + num_key_tokens_, kTextEnd) != key + num_key_tokens_) return;
  int32_t& head = heads_[home(key)];
  earlier_[static_cast<size_t>(index)] = head;
  head = static_cast<int32_t>(index);
}

size_t TokenIndex::home(const int32_t* key) const {
  uint64_t hash = 0;
  for (int32_t i = 0; i < num_key_tokens_; ++i) {
    hash = (hash ^ static_cast<uint32_t>(key[i])) * 0x9E3779B97F4A7C15;  // the golden ratio's bits
    hash ^= hash >> 32;
  }
  return hash & (heads_.size() - 1);
}

}  // namespace lmi
