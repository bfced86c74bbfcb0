#include "cpu/sampling_row.h"

#include <cstddef>

namespace lmi::cpu {

SamplingRowView view_sampling_row(const SamplingTable& table, int32_t row) {
  const SamplingRow& source = table.rows[static_cast<size_t>(row)];
  SamplingRowView view;
  view.temperature = source.temperature;
  view.top_k = source.top_k;
  view.top_p = source.top_p;
  view.min_p = source.min_p;
  view.repetition_penalty = source.repetition_penalty;
  view.presence_penalty = source.presence_penalty;
  view.frequency_penalty = source.frequency_penalty;
  view.seed = source.seed;
  view.choice = source.choice;
  view.num_logprobs = source.num_logprobs;
  view.logit_bias = source.logit_bias.data();
  view.num_logit_bias = static_cast<int64_t>(source.logit_bias.size());
  view.banned_ids = source.banned_ids.data();
  view.num_banned_ids = static_cast<int64_t>(source.banned_ids.size());
  if (source.num_output < source.min_tokens) {
    view.min_tokens_banned_ids = source.min_tokens_banned_ids.data();
    view.num_min_tokens_banned_ids = static_cast<int64_t>(source.min_tokens_banned_ids.size());
  }
  if (source.has_penalty()) {
    view.seen = source.seen.data();
    view.num_seen = static_cast<int64_t>(source.seen.size());
  }
  return view;
}

}  // namespace lmi::cpu
