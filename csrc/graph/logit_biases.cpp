#include "graph/logit_biases.h"

#include <algorithm>

#include "common/check.h"

namespace lmi {

namespace {

int32_t last_but_one(const SequenceBias& each) { return each.token_ids.end()[-2]; }

}  // namespace

void sum_biases(std::vector<TokenBias>& biases) {
  std::ranges::stable_sort(biases, {}, &TokenBias::first);
  size_t count = 0;
  for (const auto& [token_id, bias] : biases) {
    if (count > 0 && biases[count - 1].first == token_id) {
      biases[count - 1].second += bias;
    } else {
      biases[count++] = {token_id, bias};
    }
  }
  biases.resize(count);
}

LogitBiases::LogitBiases(std::vector<TokenBias> of_tokens, std::vector<SequenceBias> of_sequences)
    : of_tokens_(std::move(of_tokens)) {
  const auto note_id = [&](int32_t token_id) {
    min_id_ = std::min(min_id_, token_id);
    max_id_ = std::max(max_id_, token_id);
  };
  for (const auto& [token_id, bias] : of_tokens_) note_id(token_id);
  for (SequenceBias& each : of_sequences) {
    LMI_CHECK(!each.token_ids.empty(), "a bias of no tokens");
    for (const int32_t token_id : each.token_ids) note_id(token_id);
    if (each.token_ids.size() == 1) {
      of_tokens_.emplace_back(each.token_ids.front(), each.bias);
    } else {
      num_last_ = std::max(num_last_, each.token_ids.size());
      of_sequences_.push_back(std::move(each));
    }
  }
  sum_biases(of_tokens_);
  std::ranges::stable_sort(of_sequences_, {}, last_but_one);
}

std::vector<TokenBias> LogitBiases::behind(std::span<const int32_t> last_ids) const {
  std::vector<TokenBias> biases;
  std::vector<TokenBias> found;
  if (last_ids.empty()) return biases;
  for (const SequenceBias& each :
       std::ranges::equal_range(of_sequences_, last_ids.back(), {}, last_but_one)) {
    // One that is longer than the text so far doesn't count, though its last token is to come.
    if (each.token_ids.size() > last_ids.size()) continue;
    const std::span<const int32_t> before =
        std::span(each.token_ids).first(each.token_ids.size() - 1);
    if (std::ranges::equal(before, last_ids.last(before.size()))) {
      found.emplace_back(each.token_ids.back(), each.bias);
    }
  }
  std::ranges::stable_sort(found, {}, &TokenBias::first);
  for (const TokenBias& each : found) {
    const bool is_new = biases.empty() || biases.back().first != each.first;
    const auto own = std::ranges::lower_bound(of_tokens_, each.first, {}, &TokenBias::first);
    if (is_new && own != of_tokens_.end() && own->first == each.first) biases.push_back(*own);
    biases.push_back(each);
  }
  sum_biases(biases);
  return biases;
}

}  // namespace lmi
