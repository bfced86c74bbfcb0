// Per-sequence sampling parameters and token counts, read by the sample kernels.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "graph/logit_biases.h"

namespace lmi {

// One distinct token that a sequence has seen.
struct SeenToken {
  int32_t token_id;
  int32_t num_output;  // times it was generated; 0: only in the prompt
};

// Makes tokens the likelier the longer the output is (Transformers'
// exponential_decay_length_penalty).
struct LengthPenalty {
  int32_t start = 0;               // output tokens before it
  float factor = 1.0f;             // to the power of the tokens since then; 1: none
  std::vector<int32_t> token_ids;  // distinct and ascending
};

struct SamplingRow {
  float temperature = 0.0f;  // 0: greedy
  int32_t top_k = 0;         // 0: off
  float top_p = 1.0f;
  float min_p = 0.0f;
  float typical_p = 1.0f;
  float epsilon_cutoff = 0.0f;      // 0: off
  float eta_cutoff = 0.0f;          // 0: off
  float repetition_penalty = 1.0f;  // over prompt and output
  float presence_penalty = 0.0f;    // over output
  float frequency_penalty = 0.0f;   // over output
  uint64_t seed = 0;
  int32_t choice = 0;        // index among the request's choices
  int32_t num_logprobs = 0;  // top-n to report; -1: not even the sampled token's
  int32_t min_tokens = 0;
  int32_t num_output = 0;                     // output tokens observed
  double watermark_gamma = 0.0;               // share of the vocabulary that is favoured
  float watermark_delta = 0.0f;               // added to its logits; 0: no watermark
  std::shared_ptr<const LogitBiases> biases;  // the request's; null: none
  std::vector<int32_t> banned_ids;
  float prompt_reward = 1.0f;       // how many times as likely the prompt's tokens are; 1: off
  std::vector<int32_t> prompt_ids;  // distinct and ascending; kept only for it
  LengthPenalty length_penalty;
  std::vector<int32_t> last_ids;                    // as many as the biases look at
  std::vector<TokenBias> biases_behind;             // which these have, see logit_biases.h
  std::vector<int32_t> min_tokens_banned_ids;       // banned while num_output < min_tokens
  std::vector<SeenToken> seen;                      // kept only when a penalty is on
  std::unordered_map<int32_t, int32_t> seen_index;  // token id -> index in seen

  bool has_penalty() const {
    return repetition_penalty != 1.0f || presence_penalty != 0.0f || frequency_penalty != 0.0f;
  }

  void observe_prompt(std::span<const int32_t> token_ids) {
    if (repetition_penalty != 1.0f) {
      for (const int32_t token_id : token_ids) see(token_id);
    }
    follow(token_ids);
  }
  void observe(std::span<const int32_t> token_ids) {
    num_output += static_cast<int32_t>(token_ids.size());
    if (has_penalty()) {
      for (const int32_t token_id : token_ids) ++see(token_id).num_output;
    }
    follow(token_ids);
  }

 private:
  // Biases are looked for behind the last of these tokens alone, whatever their number.
  void follow(std::span<const int32_t> token_ids) {
    const size_t most = biases == nullptr ? 0 : biases->num_last();
    if (most == 0) return;
    token_ids = token_ids.last(std::min(token_ids.size(), most));
    last_ids.insert(last_ids.end(), token_ids.begin(), token_ids.end());
    if (last_ids.size() > most) {
      last_ids.erase(last_ids.begin(), last_ids.end() - static_cast<std::ptrdiff_t>(most));
    }
    biases_behind = biases->behind(last_ids);
  }
  SeenToken& see(int32_t token_id) {
    const auto [entry, is_new] =
        seen_index.try_emplace(token_id, static_cast<int32_t>(seen.size()));
    if (is_new) seen.push_back({token_id, 0});
    return seen[entry->second];
  }
};

struct SamplingTable {
  int32_t vocab_size = 0;
  std::vector<SamplingRow> rows;
};

}  // namespace lmi
