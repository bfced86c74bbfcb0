#include "cpu/sampling_row.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <span>

#include "cpu/watermark.h"

namespace lmi::cpu {

namespace {

constexpr double kMaxGrowth = 1e9;  // decides whatever the logits are, and leaves them finite

void view_length_penalty(const LengthPenalty& penalty, int64_t num_output, SamplingRowView& view) {
  const int64_t since = num_output - penalty.start;
  if (penalty.factor == 1.0f || since <= 0) return;
  view.growth = static_cast<float>(
      std::min(kMaxGrowth, std::pow(double{penalty.factor}, static_cast<double>(since))));
  view.growing_ids = penalty.token_ids.data();
  view.num_growing_ids = static_cast<int64_t>(penalty.token_ids.size());
}

}  // namespace

SamplingRowView view_sampling_row(const SamplingRow& source, const int32_t* drafts,
                                  int64_t num_drafts, int32_t previous_id) {
  SamplingRowView view;
  view.temperature = source.temperature;
  view.top_k = source.top_k;
  view.top_p = source.top_p;
  view.min_p = source.min_p;
  view.typical_p = source.typical_p;
  view.epsilon_cutoff = source.epsilon_cutoff;
  view.eta_cutoff = source.eta_cutoff;
  view.repetition_penalty = source.repetition_penalty;
  view.presence_penalty = source.presence_penalty;
  view.frequency_penalty = source.frequency_penalty;
  view.seed = source.seed;
  view.choice = source.choice;
  view.num_logprobs = source.num_logprobs;
  view.watermark_gamma = source.watermark_gamma;
  view.watermark_delta = source.watermark_delta;
  view.previous_id = previous_id;
  if (source.biases != nullptr) {
    view.logit_bias = source.biases->of_tokens().data();
    view.num_logit_bias = std::ssize(source.biases->of_tokens());
  }
  view.biases_behind = source.biases_behind.data();
  view.num_biases_behind = std::ssize(source.biases_behind);
  view.banned_ids = source.banned_ids.data();
  view.num_banned_ids = static_cast<int64_t>(source.banned_ids.size());
  view.prompt_ids = source.prompt_ids.data();
  view.num_prompt_ids = static_cast<int64_t>(source.prompt_ids.size());
  view.prompt_reward = source.prompt_reward;
  view_length_penalty(source.length_penalty, source.num_output + num_drafts, view);
  if (source.num_output + num_drafts < source.min_tokens) {
    view.min_tokens_banned_ids = source.min_tokens_banned_ids.data();
    view.num_min_tokens_banned_ids = static_cast<int64_t>(source.min_tokens_banned_ids.size());
  }
  if (source.has_penalty()) {
    view.seen = source.seen.data();
    view.num_seen = static_cast<int64_t>(source.seen.size());
    view.drafts = drafts;
    view.num_drafts = num_drafts;
  }
  return view;
}

SamplingRowView view_sampling_row(const StepView& step, int64_t logit_row) {
  const SamplingRow& source =
      step.sampling->rows[static_cast<size_t>(step.sampling_rows[logit_row])];
  if (step.token_ids == nullptr) return view_sampling_row(source, nullptr, 0, 0);
  const int32_t num_drafts = step.num_drafts == nullptr ? 0 : step.num_drafts[logit_row];
  const int32_t last = step.logit_token_rows[logit_row];
  const int32_t* drafts = step.token_ids + last + 1 - num_drafts;
  return view_sampling_row(source, drafts, num_drafts, step.token_ids[last]);
}

std::vector<TokenBias> all_biases(const SamplingRowView& row, int32_t vocab_size,
                                  std::vector<int32_t>& order) {
  std::vector<TokenBias> biases;
  biases.reserve(static_cast<size_t>(row.num_logit_bias + row.num_biases_behind));
  BiasCursor cursor;
  for (AddedBias each = {}; next_bias(row, cursor, each);) {
    biases.emplace_back(each.token_id, each.bias);
  }
  if (row.watermark_delta == 0.0f) return biases;
  order.resize(static_cast<size_t>(vocab_size));
  const int32_t count =
      favour_tokens(row.previous_id, row.watermark_gamma, vocab_size, order.data());
  for (int32_t i = 0; i < count; ++i) {
    biases.emplace_back(order[static_cast<size_t>(i)], row.watermark_delta);
  }
  if (row.num_logit_bias + row.num_biases_behind > 0) sum_biases(biases);
  return biases;
}

bool modifies_logits(const SamplingRowView& row) {
  return row.num_logit_bias + row.num_biases_behind + row.num_banned_ids +
                 row.num_min_tokens_banned_ids + row.num_seen + row.num_drafts + num_scales(row) >
             0 ||
         row.watermark_delta != 0.0f;
}

static bool wants_argmax(const StepView& step, int32_t logit_row) {
  if (step.sampling_rows[logit_row] < 0 || step.target_ids[logit_row] >= 0) return false;
  if (step.masks != nullptr && step.masks[logit_row] != nullptr) return false;
  const SamplingRowView row = view_sampling_row(step, logit_row);
  return row.temperature < kMinTemperature && row.num_logprobs < 0 && !modifies_logits(row);
}

int64_t mark_argmax_rows(const StepView& step, uint8_t* is_marked) {
  int64_t num_marked = 0;
  for (int32_t row = 0; row < step.num_logit_rows; ++row) {
    is_marked[row] = wants_argmax(step, row) ? 1 : 0;
    num_marked += is_marked[row];
  }
  return num_marked;
}

const uint32_t* wait_for_mask(const StepView& step, int64_t logit_row) {
  if (step.masks == nullptr || step.masks[logit_row] == nullptr) return nullptr;
  // atomic_ref takes no const before C++26; nothing is written.
  const std::atomic_ref<uint32_t> ready(const_cast<uint32_t&>(step.mask_ready[logit_row]));
  while (ready.load(std::memory_order_acquire) == 0) ready.wait(0, std::memory_order_acquire);
  return step.masks[logit_row];
}

}  // namespace lmi::cpu
