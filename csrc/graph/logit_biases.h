// What a request adds to logits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace lmi {

using TokenBias = std::pair<int32_t, float>;

// Added to the logit of the last of several tokens, where the others are a text's last ones.
struct SequenceBias {
  std::vector<int32_t> token_ids;
  float bias;
};

// Leave one bias of a token, the sum of its own in their order; tokens are in the order of ids
// then.
void sum_biases(std::vector<TokenBias>& biases);

// Those of a request, made once for all of its rows.
class LogitBiases {
 public:
  // Sequences of one token are biases of that token, behind `of_tokens`.
  LogitBiases(std::vector<TokenBias> of_tokens, std::vector<SequenceBias> of_sequences);

  // Those of tokens whatever comes before them: one of each, in the order of ids.
  const std::vector<TokenBias>& of_tokens() const { return of_tokens_; }
  // Of the tokens that have others behind a text of which these are the last, num_last() or all
  // there are: one of each, in the order of ids, with that of of_tokens(), whose place it takes.
  std::vector<TokenBias> behind(std::span<const int32_t> last_ids) const;
  size_t num_last() const { return num_last_; }
  // Both are of all token ids in it.
  int32_t min_id() const { return min_id_; }
  int32_t max_id() const { return max_id_; }

 private:
  std::vector<TokenBias> of_tokens_;
  std::vector<SequenceBias> of_sequences_;  // by their last token but one, else as they came
  size_t num_last_ = 0;
  int32_t min_id_ = 0;
  int32_t max_id_ = 0;
};

}  // namespace lmi
