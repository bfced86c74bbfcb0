#include "graph/device_sampling.h"

#include <algorithm>

#include "cpu/sampling_row.h"

namespace lmi {
namespace {

bool has_mask(const StepView& step, int32_t logit_row) {
  return step.masks != nullptr && step.masks[logit_row] != nullptr;
}

}  // namespace

void DeviceSampling::Edits::clear() {
  offsets.assign(1, 0);
  ids.clear();
  values.clear();
}

void DeviceSampling::Edits::add(int32_t id, float value) {
  ids.push_back(id);
  values.push_back(value);
}

LmiStepSampling DeviceSampling::gather_rows(const StepView& step) {
  LmiStepSampling sampling = {};
  rows_.clear();
  int32_t num_masks = 0;
  for (int32_t logit_row = 0; logit_row < step.num_logit_rows; ++logit_row) {
    LmiSampleRow row = row_of(step, logit_row);
    if (has_mask(step, logit_row)) row.mask = num_masks++;
    sampling.max_top = std::max(sampling.max_top, row.num_top);
    rows_.push_back(row);
  }
  sampling.rows = rows_.data();
  return sampling;
}

LmiSampleRow DeviceSampling::row_of(const StepView& step, int32_t logit_row) {
  const int32_t target_id = step.target_ids[logit_row];
  LmiSampleRow row = {};
  row.target_id = target_id;
  row.position = step.sample_positions[logit_row];
  row.mask = -1;
  row.top_p = row.typical_p = row.repetition_penalty = 1.0f;
  const int32_t most_top = std::min(step.capacity.max_logprobs, step.sampling->vocab_size);
  if (step.sampling_rows[logit_row] < 0) {
    row.num_top = target_id >= 0 ? most_top : 0;
    return row;
  }
  const cpu::SamplingRowView rules = cpu::view_sampling_row(step, logit_row);
  const bool is_greedy = target_id >= 0 || rules.temperature < cpu::kMinTemperature;
  row.seed = rules.seed;
  row.choice = rules.choice;
  row.is_sampled = target_id < 0;
  row.num_top = std::clamp(rules.num_logprobs, 0, most_top);
  row.top_k = rules.top_k;
  row.temperature = is_greedy ? 0.0f : rules.temperature;
  row.top_p = rules.top_p;
  row.min_p = rules.min_p;
  row.typical_p = rules.typical_p;
  row.repetition_penalty = rules.repetition_penalty;
  row.presence_penalty = rules.presence_penalty;
  row.frequency_penalty = rules.frequency_penalty;
  return row;
}

const LmiStepEdits* DeviceSampling::gather_edits(const StepView& step) {
  masks_.clear();
  for (Edits* edits : {&biases_, &seen_, &bans_}) edits->clear();
  for (int32_t row = 0; row < step.num_logit_rows; ++row) {
    if (step.sampling_rows[row] >= 0) add_edits(step, row);
    for (Edits* edits : {&biases_, &seen_, &bans_}) edits->end_row();
    if (has_mask(step, row)) masks_.push_back(cpu::wait_for_mask(step, row));
  }
  gathered_ = {biases_.view(), seen_.view(), bans_.view(), masks_.data(),
               static_cast<int32_t>(masks_.size())};
  return &gathered_;
}

void DeviceSampling::add_edits(const StepView& step, int32_t logit_row) {
  const cpu::SamplingRowView rules = cpu::view_sampling_row(step, logit_row);
  for (const auto& [id, bias] : cpu::all_biases(rules, step.sampling->vocab_size, order_)) {
    biases_.add(id, bias);
  }
  for (int64_t i = 0; i < rules.num_seen + rules.num_drafts; ++i) {
    const SeenToken seen = cpu::seen_token(rules, i);
    if (seen.token_id >= 0) seen_.add(seen.token_id, static_cast<float>(seen.num_output));
  }
  for (int64_t i = 0; i < rules.num_banned_ids; ++i) bans_.add(rules.banned_ids[i], 0.0f);
  for (int64_t i = 0; i < rules.num_min_tokens_banned_ids; ++i) {
    bans_.add(rules.min_tokens_banned_ids[i], 0.0f);
  }
}

}  // namespace lmi
