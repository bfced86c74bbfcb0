#include "graph/device_sampling.h"

#include <algorithm>

#include "cpu/sampling_row.h"

namespace lmi {

void DeviceSampling::Edits::clear() {
  offsets.assign(1, 0);
  ids.clear();
  values.clear();
}

void DeviceSampling::Edits::add(int32_t id, float value) {
  ids.push_back(id);
  values.push_back(value);
}

void DeviceSampling::gather(const StepView& step) {
  step_ = &step;
  rows_.clear();
  masks_.clear();
  max_top_ = 0;
  for (Edits* edits : {&biases_, &seen_, &bans_}) edits->clear();
  for (int32_t row = 0; row < step.num_logit_rows; ++row) {
    add_row(step, row);
    for (Edits* edits : {&biases_, &seen_, &bans_}) edits->end_row();
  }
}

void DeviceSampling::add_row(const StepView& step, int32_t logit_row) {
  const int32_t target_id = step.target_ids[logit_row];
  LmiSampleRow row = {};
  row.target_id = target_id;
  row.position = step.sample_positions[logit_row];
  row.mask = -1;
  row.top_p = row.typical_p = row.repetition_penalty = 1.0f;
  const int32_t most_top = std::min(step.capacity.max_logprobs, step.sampling->vocab_size);
  if (step.sampling_rows[logit_row] < 0) {
    row.num_top = target_id >= 0 ? most_top : 0;
  } else {
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
  if (step.masks != nullptr && step.masks[logit_row] != nullptr) {
    row.mask = static_cast<int32_t>(masks_.size());
    masks_.push_back(step.masks[logit_row]);
  }
  max_top_ = std::max(max_top_, row.num_top);
  rows_.push_back(row);
}

void DeviceSampling::wait_for_masks(void* self) {
  const StepView& step = *static_cast<DeviceSampling*>(self)->step_;
  for (int32_t row = 0; row < step.num_logit_rows; ++row) (void)cpu::wait_for_mask(step, row);
}

LmiStepSampling DeviceSampling::inputs() {
  LmiStepSampling inputs = {};
  inputs.rows = rows_.data();
  inputs.biases = biases_.view();
  inputs.seen = seen_.view();
  inputs.bans = bans_.view();
  inputs.masks = masks_.data();
  inputs.wait_for_masks = &wait_for_masks;
  inputs.context = this;
  inputs.num_masks = static_cast<int32_t>(masks_.size());
  inputs.max_top = max_top_;
  return inputs;
}

}  // namespace lmi
