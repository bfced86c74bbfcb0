// A row of the sampling table as plain pointers, so that code compiled per instruction set touches
// no standard containers (the linker may keep any one copy of an inline function).
#pragma once

#include <cstdint>
#include <vector>

#include "graph/sampling_table.h"
#include "graph/step.h"

namespace lmi::cpu {

// What is added to a logit.
struct AddedBias {
  int32_t token_id;
  float bias;
};

// What a logit is multiplied by.
struct TokenScale {
  int32_t token_id;
  float above;  // 0
  float below;
};

struct SamplingRowView {
  float temperature = 0.0f;
  int32_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
  float typical_p = 1.0f;
  float epsilon_cutoff = 0.0f;
  float eta_cutoff = 0.0f;
  float repetition_penalty = 1.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  uint64_t seed = 0;
  int32_t choice = 0;
  int32_t num_logprobs = 0;
  double watermark_gamma = 0.0;
  float watermark_delta = 0.0f;
  int32_t previous_id = 0;  // the token before the one that is sampled

  const TokenBias* logit_bias = nullptr;  // by ids, one of a token
  int64_t num_logit_bias = 0;
  const TokenBias* biases_behind = nullptr;  // in the place of these tokens' own, by ids
  int64_t num_biases_behind = 0;
  const int32_t* banned_ids = nullptr;
  int64_t num_banned_ids = 0;
  const int32_t* min_tokens_banned_ids = nullptr;  // none once min_tokens were generated
  int64_t num_min_tokens_banned_ids = 0;
  const int32_t* prompt_ids = nullptr;  // which have a reward, in ascending order
  int64_t num_prompt_ids = 0;
  float prompt_reward = 1.0f;
  const int32_t* growing_ids = nullptr;  // of the length penalty, once it has begun; ascending
  int64_t num_growing_ids = 0;
  float growth = 1.0f;
  const SeenToken* seen = nullptr;  // none when no penalty is on
  int64_t num_seen = 0;
  const int32_t* drafts = nullptr;  // counted as seen_token() does; none when no penalty is on
  int64_t num_drafts = 0;
};

// A row as it is once its sequence has generated the drafts; `previous_id` is its last token then.
SamplingRowView view_sampling_row(const SamplingRow& source, const int32_t* drafts,
                                  int64_t num_drafts, int32_t previous_id);

// That of a logit row which samples with one.
SamplingRowView view_sampling_row(const StepView& step, int64_t logit_row);

// What a row has seen of one token, for i < num_seen + num_drafts; token_id -1: another i has it.
static inline SeenToken seen_token(const SamplingRowView& row, int64_t i) {
  const int64_t draft = i - row.num_seen;
  SeenToken seen = draft < 0 ? row.seen[i] : SeenToken{row.drafts[draft], 0};
  for (int64_t k = 0; draft >= 0 && k < row.num_seen; ++k) {
    if (row.seen[k].token_id == seen.token_id) return {-1, 0};
  }
  for (int64_t k = 0; k < row.num_drafts; ++k) {
    if (row.drafts[k] != seen.token_id) continue;
    if (k < draft) return {-1, 0};
    ++seen.num_output;
  }
  return seen;
}

// What goes through a row's biases, its watermark aside, in the order of ids.
struct BiasCursor {
  int64_t of_token = 0;
  int64_t behind = 0;
};

// False at their end.
static inline bool next_bias(const SamplingRowView& row, BiasCursor& cursor, AddedBias& next) {
  const bool has_token = cursor.of_token < row.num_logit_bias;
  if (cursor.behind < row.num_biases_behind) {
    const TokenBias& behind = row.biases_behind[cursor.behind];
    if (!has_token || behind.first <= row.logit_bias[cursor.of_token].first) {
      if (has_token && row.logit_bias[cursor.of_token].first == behind.first) ++cursor.of_token;
      next = {behind.first, behind.second};
      ++cursor.behind;
      return true;
    }
  }
  if (!has_token) return false;
  const TokenBias& of_token = row.logit_bias[cursor.of_token++];
  next = {of_token.first, of_token.second};
  return true;
}

// What is added to a row's logits, its watermark's too: one bias of a token, so that no sampler
// adds in an order of its own. `order`: memory for tokens of the vocabulary, with a watermark.
std::vector<TokenBias> all_biases(const SamplingRowView& row, int32_t vocab_size,
                                  std::vector<int32_t>& order);

// Whether an ascending list has an id.
static inline bool has_id(const int32_t* ids, int64_t count, int32_t token_id) {
  int64_t begin = 0;
  for (int64_t end = count; begin < end;) {
    const int64_t middle = begin + (end - begin) / 2;
    if (ids[middle] < token_id) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin < count && ids[begin] == token_id;
}

// What scales one token's logit, for i < num_scales(row); token_id -1: another i has it. A length
// penalty adds (growth - 1) times the logit's amount.
static inline int64_t num_scales(const SamplingRowView& row) {
  return row.num_prompt_ids + row.num_growing_ids;
}

static inline TokenScale token_scale(const SamplingRowView& row, int64_t i) {
  const float reward = row.prompt_reward;
  if (i < row.num_prompt_ids) {
    const int32_t token_id = row.prompt_ids[i];
    if (has_id(row.growing_ids, row.num_growing_ids, token_id)) return {-1, 1.0f, 1.0f};
    return {token_id, reward, 1.0f / reward};
  }
  TokenScale scale = {row.growing_ids[i - row.num_prompt_ids], row.growth, 2.0f - row.growth};
  if (has_id(row.prompt_ids, row.num_prompt_ids, scale.token_id)) {
    scale.above *= reward;
    scale.below /= reward;
  }
  return scale;
}

// Whether the row draws from other logits than the model's, masks aside.
bool modifies_logits(const SamplingRowView& row);

constexpr float kMinTemperature = 1e-5f;  // below: greedy

// Marks the logit rows that take their most likely token and report nothing; how many there are.
int64_t mark_argmax_rows(const StepView& step, uint8_t* is_marked);

// The mask of a logit row once it is filled, null if every token is allowed. Sleeps until then: the
// engine's loop fills masks while the rest of the step runs, and never waits for this step itself.
const uint32_t* wait_for_mask(const StepView& step, int64_t logit_row);

}  // namespace lmi::cpu
