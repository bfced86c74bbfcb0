// Host code only.
#include "cuda/step_packer.h"

#include "cuda/launch.cuh"

namespace lmi::cuda {

size_t StepPacker::add_attention(const AttentionShape& shape) {
  auto found = std::find(shapes_.begin(), shapes_.end(), shape);
  if (found == shapes_.end()) found = shapes_.insert(found, shape);
  return static_cast<size_t>(found - shapes_.begin());
}

int32_t StepPacker::set_adapter(int32_t slot, uint64_t parts) {
  if (slot < 0 || static_cast<size_t>(slot) >= adapters_.size()) {
    return fail("adapter slot " + std::to_string(slot) + " of " + std::to_string(adapters_.size()));
  }
  adapters_[static_cast<size_t>(slot)] = parts;
  return kOk;
}

StepCounts StepPacker::most() const {
  StepCounts counts;
  counts.num_tokens = sizes_.max_tokens;
  counts.num_seqs = sizes_.max_seqs;
  counts.num_logit_rows = sizes_.max_logit_rows;
  counts.num_copies = sizes_.max_copies;
  counts.table_columns = sizes_.max_blocks_per_seq;
  counts.num_lora_tiles = adapters_.empty() ? 0 : sizes_.max_tokens;
  const int64_t num_keys = int64_t{sizes_.max_blocks_per_seq} * sizes_.block_size;
  for (const AttentionShape& shape : shapes_) {
    counts.work.push_back(
        {most_decode_work(shape, sizes_, sizes_.max_seqs, num_keys), sizes_.max_tokens});
  }
  return counts;
}

StepCounts StepPacker::counts_of(StepShape shape) const {
  const auto [num_rows, num_keys, has_adapters] = shape;
  StepCounts counts;
  counts.num_lora_tiles = has_adapters ? num_rows : 0;
  counts.num_tokens = counts.num_seqs = counts.num_logit_rows = num_rows;
  counts.table_columns = ceil_div(num_keys, sizes_.block_size);
  for (const AttentionShape& attention : shapes_) {
    counts.work.push_back({most_decode_work(attention, sizes_, num_rows, num_keys), 0});
  }
  return counts;
}

int64_t StepPacker::num_partial_values() const {
  int64_t most_values = 0;
  const StepCounts counts = most();
  for (size_t i = 0; i < shapes_.size(); ++i) {
    const int64_t values =
        int64_t{counts.work[i].num_decode} * shapes_[i].num_q_heads * shapes_[i].head_dim;
    most_values = greater_of(most_values, values);
  }
  return most_values;
}

int64_t StepPacker::num_log_masses() const {
  int64_t most_values = 0;
  const StepCounts counts = most();
  for (size_t i = 0; i < shapes_.size(); ++i) {
    most_values =
        greater_of(most_values, int64_t{counts.work[i].num_decode} * shapes_[i].num_q_heads);
  }
  return most_values;
}

int32_t StepPacker::check(const LmiStep& step) const {
  const auto is_beyond = [](int32_t count, int32_t most) { return count < 0 || count > most; };
  if (is_beyond(step.num_tokens, sizes_.max_tokens) || is_beyond(step.num_seqs, sizes_.max_seqs) ||
      is_beyond(step.num_logit_rows, sizes_.max_logit_rows) ||
      is_beyond(step.num_copies, sizes_.max_copies) ||
      is_beyond(step.sampling.max_top, sizes_.max_top)) {
    return fail("a step of " + std::to_string(step.num_tokens) + " tokens, " +
                std::to_string(step.num_seqs) + " sequences, " +
                std::to_string(step.num_logit_rows) + " logit rows, " +
                std::to_string(step.num_copies) + " copies and " +
                std::to_string(step.sampling.max_top) +
                " log-probabilities a row is more than the list was made for");
  }
  return check_adapters(step);
}

int32_t StepPacker::check_adapters(const LmiStep& step) const {
  for (int32_t run = 0; run < step.num_adapter_runs; ++run) {
    const auto slot = static_cast<size_t>(step.adapter_slots[run]);
    if (slot < adapters_.size() && adapters_[slot] != 0) continue;
    return fail("the step's adapter slot " + std::to_string(step.adapter_slots[run]) +
                " has no adapter");
  }
  return kOk;
}

std::vector<LmiLoraTile> StepPacker::lora_tiles(const LmiStep& step) const {
  std::vector<LmiLoraTile> tiles;
  for (int32_t run = 0; run < step.num_adapter_runs; ++run) {
    const int32_t first = step.adapter_first_rows[run];
    const int32_t count = step.adapter_num_rows[run];
    const uint64_t parts = adapters_[static_cast<size_t>(step.adapter_slots[run])];
    for (int32_t row = 0; row < count; row += LMI_MAX_FEW_ROWS) {
      tiles.push_back({parts, first + row, lower_of(count - row, LMI_MAX_FEW_ROWS)});
    }
  }
  return tiles;
}

SizedStep StepPacker::size(const LmiStep& step, const StepShape* shape) const {
  SizedStep sized;
  sized.num_rows.assign(step.num_rows, step.num_rows + step.num_seqs);
  sized.kv_lengths.assign(step.kv_lengths, step.kv_lengths + step.num_seqs);
  sized.lora_tiles = lora_tiles(step);
  if (shape != nullptr) {
    sized.num_rows.resize(static_cast<size_t>(shape->num_rows), 1);
    sized.kv_lengths.resize(static_cast<size_t>(shape->num_rows), 1);
    sized.counts = counts_of(*shape);
  } else {
    sized.counts.num_tokens = step.num_tokens;
    sized.counts.num_seqs = step.num_seqs;
    sized.counts.num_logit_rows = step.num_logit_rows;
    sized.counts.num_copies = step.num_copies;
    sized.counts.num_lora_tiles = static_cast<int32_t>(sized.lora_tiles.size());
    for (const int32_t length : sized.kv_lengths) {
      sized.counts.table_columns =
          greater_of(sized.counts.table_columns, ceil_div(length, sizes_.block_size));
    }
  }
  for (const AttentionShape& attention : shapes_) {
    sized.lists.push_back(list_step(attention, sizes_, sized.num_rows.data(),
                                    sized.kv_lengths.data(),
                                    static_cast<int32_t>(sized.num_rows.size())));
    if (shape != nullptr) continue;
    const AttentionLists& lists = sized.lists.back();
    sized.counts.work.push_back(
        {static_cast<int32_t>(lists.decode.size()), static_cast<int32_t>(lists.prefill.size())});
  }
  return sized;
}

bool StepPacker::fits(const SizedStep& sized) {
  const auto is_within = [](const auto& entries, int32_t most) {
    return entries.size() <= static_cast<size_t>(most);
  };
  for (size_t i = 0; i < sized.lists.size(); ++i) {
    const AttentionLists& lists = sized.lists[i];
    const StepCounts::Work& most = sized.counts.work[i];
    if (!is_within(lists.decode, most.num_decode) || !is_within(lists.prefill, most.num_prefill)) {
      return false;
    }
  }
  return true;
}

void StepPacker::fill(const LmiStep& step, const SizedStep& sized, const StepInputs& host) const {
  const StepCounts& counts = sized.counts;
  const auto copy = [](const int32_t* source, int32_t count, int32_t* target, int32_t capacity,
                       int32_t rest) {
    std::copy_n(source, count, target);
    std::fill(target + count, target + capacity, rest);
  };
  const int32_t scratch_slot = sizes_.scratch_block * sizes_.block_size;
  copy(step.token_ids, step.num_tokens, host.token_ids, counts.num_tokens, 0);
  copy(step.positions, step.num_tokens, host.positions, counts.num_tokens, 0);
  copy(step.slots, step.num_tokens, host.slots, counts.num_tokens, scratch_slot);
  copy(step.followed_rows, step.followed_rows == nullptr ? 0 : step.num_tokens, host.followed_rows,
       counts.num_tokens, 0);
  copy(step.first_rows, step.num_seqs, host.first_rows, counts.num_seqs, 0);
  copy(step.logit_token_rows, step.num_logit_rows, host.logit_token_rows, counts.num_logit_rows, 0);
  for (int32_t row = step.num_seqs; row < counts.num_seqs; ++row) {
    host.first_rows[row] = host.logit_token_rows[row] = row;
  }
  std::copy(sized.num_rows.begin(), sized.num_rows.end(), host.num_rows);
  std::copy(sized.kv_lengths.begin(), sized.kv_lengths.end(), host.kv_lengths);
  std::copy_n(step.copy_src, counts.num_copies, host.copy_src);
  std::copy_n(step.copy_dst, counts.num_copies, host.copy_dst);
  copy_work(sized.lora_tiles, counts.num_lora_tiles, host.lora_tiles);
  fill_tables(step, counts, host);
  std::copy_n(step.sampling.rows, step.num_logit_rows, host.sample_rows);
  for (size_t i = 0; i < shapes_.size(); ++i) {
    const AttentionLists& lists = sized.lists[i];
    copy_work(lists.decode, counts.work[i].num_decode, host.work[i].decode);
    copy_work(lists.prefill, counts.work[i].num_prefill, host.work[i].prefill);
  }
}

void StepPacker::fill_tables(const LmiStep& step, const StepCounts& counts,
                             const StepInputs& host) const {
  const int64_t columns = counts.table_columns;
  std::fill_n(host.block_tables, counts.num_seqs * columns, sizes_.scratch_block);
  for (int32_t seq = 0; seq < step.num_seqs; ++seq) {
    const int32_t* blocks = step.block_tables + int64_t{step.table_rows[seq]} * step.table_stride;
    std::copy_n(blocks, ceil_div(step.kv_lengths[seq], sizes_.block_size),
                host.block_tables + seq * columns);
  }
}

}  // namespace lmi::cuda
