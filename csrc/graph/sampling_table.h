// Per-sequence sampling parameters and token counts, read by the sample kernels.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace lmi {

// One distinct token that a sequence has seen.
struct SeenToken {
  int32_t token_id;
  int32_t num_output;  // times it was generated; 0: only in the prompt
};

struct SamplingRow {
  float temperature = 0.0f;  // 0: greedy
  int32_t top_k = 0;         // 0: off
  float top_p = 1.0f;
  float min_p = 0.0f;
  float typical_p = 1.0f;
  float repetition_penalty = 1.0f;  // over prompt and output
  float presence_penalty = 0.0f;    // over output
  float frequency_penalty = 0.0f;   // over output
  uint64_t seed = 0;
  int32_t choice = 0;        // index among the request's choices
  int32_t num_logprobs = 0;  // top-n to report; -1: not even the sampled token's
  int32_t min_tokens = 0;
  int32_t num_output = 0;        // output tokens observed
  double watermark_gamma = 0.0;  // share of the vocabulary that is favoured
  float watermark_delta = 0.0f;  // added to its logits; 0: no watermark
  std::vector<std::pair<int32_t, float>> logit_bias;
  std::vector<int32_t> banned_ids;
  std::vector<int32_t> min_tokens_banned_ids;       // banned while num_output < min_tokens
  std::vector<SeenToken> seen;                      // kept only when a penalty is on
  std::unordered_map<int32_t, int32_t> seen_index;  // token id -> index in seen

  bool has_penalty() const {
    return repetition_penalty != 1.0f || presence_penalty != 0.0f || frequency_penalty != 0.0f;
  }

  void observe_prompt(int32_t token_id) { see(token_id); }
  void observe(int32_t token_id) {
    ++num_output;
    if (has_penalty()) ++see(token_id).num_output;
  }

 private:
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
