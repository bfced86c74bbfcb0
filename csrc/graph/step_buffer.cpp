#include "graph/step_buffer.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "common/check.h"

namespace lmi {

StepBuffer::StepBuffer(StepCapacity capacity, const BlockTables& tables, SamplingTable& sampling)
    : tables_(tables), sampling_(sampling) {
  LMI_CHECK(capacity.max_tokens > 0 && capacity.max_seqs > 0 && capacity.max_logit_rows > 0,
            "capacities must be positive");
  LMI_CHECK(capacity.block_size > 0, "block_size ", capacity.block_size);
  static_assert(sizeof(float) == sizeof(int32_t));
  capacity.max_blocks_per_seq = tables.max_blocks_per_seq();
  view_.capacity = capacity;
  view_.block_tables = tables.data();
  view_.sampling = &sampling;

  const int64_t num_top = static_cast<int64_t>(capacity.max_logit_rows) * capacity.max_logprobs;
  const int64_t total = 4LL * capacity.max_tokens + 7LL * capacity.max_seqs +
                        9LL * capacity.max_logit_rows + 2LL * capacity.max_copies + 2 * num_top;
  memory_ = std::make_unique<int32_t[]>(total);
  int32_t* next = memory_.get();
  const auto take = [&next](int64_t count) {
    int32_t* taken = next;
    next += count;
    return taken;
  };
  for (int32_t** array : {&view_.token_ids, &view_.positions, &view_.token_types, &view_.slots}) {
    *array = take(capacity.max_tokens);
  }
  for (int32_t** array :
       {&view_.first_rows, &view_.num_rows, &view_.kv_lengths, &view_.table_rows,
        &view_.adapter_first_rows, &view_.adapter_num_rows, &view_.adapter_slots}) {
    *array = take(capacity.max_seqs);
  }
  for (int32_t** array :
       {&view_.logit_token_rows, &view_.sampling_rows, &view_.sample_positions, &view_.target_ids,
        &view_.num_drafts, &view_.sampled_ids, &view_.num_top, &view_.target_ranks}) {
    *array = take(capacity.max_logit_rows);
  }
  view_.sampled_logprobs = reinterpret_cast<float*>(take(capacity.max_logit_rows));
  view_.copy_src = take(capacity.max_copies);
  view_.copy_dst = take(capacity.max_copies);
  view_.top_ids = take(num_top);
  view_.top_logprobs = reinterpret_cast<float*>(take(num_top));
  mask_memory_.resize(capacity.max_logit_rows);
  masks_.resize(capacity.max_logit_rows);
  mask_ready_.resize(capacity.max_logit_rows);
}

void StepBuffer::clear() {
  view_.num_tokens = view_.num_seqs = view_.num_logit_rows = view_.num_copies = 0;
  view_.num_adapter_runs = 0;
  view_.masks = nullptr;
  view_.mask_ready = nullptr;
  previous_ = nullptr;
  taken_.clear();
  counted_rows_.clear();
  std::fill(masks_.begin(), masks_.end(), nullptr);
  times = {};
  error.clear();
  is_final = false;
}

int32_t StepBuffer::add(const int32_t* token_ids, int32_t num_tokens, int32_t start,
                        int32_t table_row, int32_t sampling_row, LogitRows logits,
                        int32_t adapter_slot, int32_t num_first, int32_t num_drafts) {
  const StepCapacity& capacity = view_.capacity;
  LMI_CHECK(num_tokens > 0, "a sequence needs at least one token in a step");
  LMI_CHECK(view_.num_tokens + num_tokens <= capacity.max_tokens, "step has ", view_.num_tokens,
            " of ", capacity.max_tokens, " tokens, ", num_tokens, " more don't fit");
  LMI_CHECK(view_.num_seqs < capacity.max_seqs, "step already has ", capacity.max_seqs,
            " sequences");
  const int32_t new_logit_rows = logits == LogitRows::kNone  ? 0
                                 : logits == LogitRows::kAll ? num_tokens
                                                             : 1;
  LMI_CHECK(view_.num_logit_rows + new_logit_rows <= capacity.max_logit_rows, "step has ",
            view_.num_logit_rows, " of ", capacity.max_logit_rows, " logit rows, ", new_logit_rows,
            " more don't fit");
  const int32_t end = start + num_tokens;
  const std::span<const int32_t> blocks = tables_.row(table_row);
  const auto num_slots = static_cast<int64_t>(blocks.size()) * capacity.block_size;
  LMI_CHECK(start >= 0 && end <= num_slots, "tokens ", start, " to ", end,
            " need more blocks than the ", blocks.size(), " of table row ", table_row);
  const int32_t first_row = view_.num_tokens;
  for (int32_t i = 0; i < num_tokens; ++i) {
    const int32_t position = start + i;
    view_.token_ids[first_row + i] = token_ids[i];
    view_.positions[first_row + i] = position;
    view_.token_types[first_row + i] = num_first >= 0 && position >= num_first ? 1 : 0;
    view_.slots[first_row + i] = blocks[position / capacity.block_size] * capacity.block_size +
                                 position % capacity.block_size;
  }
  view_.num_tokens += num_tokens;

  const int32_t seq = view_.num_seqs++;
  view_.first_rows[seq] = first_row;
  view_.num_rows[seq] = num_tokens;
  view_.kv_lengths[seq] = end;
  view_.table_rows[seq] = table_row;
  if (adapter_slot >= 0) add_adapter_rows(adapter_slot, first_row, num_tokens);

  const int32_t first_logit_row = view_.num_logit_rows;
  if (logits == LogitRows::kNone) return -1;
  if (logits == LogitRows::kDrafts) {
    for (int32_t i = 0; i + 1 < num_tokens; ++i) {
      add_logit_row(first_row + i, sampling_row, start + i + 1, i);
    }
    add_logit_row(first_row + num_tokens - 1, sampling_row, end, num_tokens - 1);
    return first_logit_row;
  }
  if (logits == LogitRows::kAll) {
    for (int32_t i = 0; i + 1 < num_tokens; ++i) {
      const int32_t row = add_logit_row(first_row + i, sampling_row, start + i + 1);
      view_.target_ids[row] = token_ids[i + 1];
    }
  }
  const int32_t sampled = logits == LogitRows::kFirst ? 0 : num_tokens - 1;
  LMI_CHECK(num_drafts >= 0 && num_drafts <= sampled + 1, num_drafts, " drafts of ", sampled + 1,
            " tokens");
  add_logit_row(first_row + sampled, sampling_row, start + sampled + 1, num_drafts);
  return first_logit_row;
}

// The rows join the run before them if it ends where they begin and has the same adapter.
void StepBuffer::add_adapter_rows(int32_t slot, int32_t first_row, int32_t num_rows) {
  const int32_t last = view_.num_adapter_runs - 1;
  if (last >= 0 && view_.adapter_slots[last] == slot &&
      view_.adapter_first_rows[last] + view_.adapter_num_rows[last] == first_row) {
    view_.adapter_num_rows[last] += num_rows;
    return;
  }
  const int32_t run = view_.num_adapter_runs++;
  view_.adapter_first_rows[run] = first_row;
  view_.adapter_num_rows[run] = num_rows;
  view_.adapter_slots[run] = slot;
}

int32_t StepBuffer::add_logit_row(int32_t token_row, int32_t sampling_row, int32_t sample_position,
                                  int32_t num_drafts) {
  LMI_CHECK(sampling_row >= -1 && sampling_row < static_cast<int32_t>(view_.sampling->rows.size()),
            "sampling row ", sampling_row);
  const int32_t row = view_.num_logit_rows++;
  view_.logit_token_rows[row] = token_row;
  view_.sampling_rows[row] = sampling_row;
  view_.sample_positions[row] = sample_position;
  view_.target_ids[row] = -1;
  view_.num_drafts[row] = num_drafts;
  view_.sampled_ids[row] = -1;
  view_.sampled_logprobs[row] = 0.0f;
  view_.target_ranks[row] = 0;
  view_.num_top[row] = 0;
  return row;
}

int32_t StepBuffer::add_following(const std::vector<int32_t>& starts,
                                  const std::vector<int32_t>& rows,
                                  const std::vector<int32_t>& adapter_slots) {
  LMI_CHECK(rows.size() == starts.size() && adapter_slots.size() == starts.size(), starts.size(),
            " starts, ", rows.size(), " rows, ", adapter_slots.size(), " adapters");
  const int32_t first = view_.num_logit_rows;
  const int32_t unknown = 0;
  for (size_t i = 0; i < starts.size(); ++i) {
    add(&unknown, 1, starts[i], rows[i], rows[i], LogitRows::kLast, adapter_slots[i]);
  }
  return first;
}

void StepBuffer::set_target(int32_t logit_row, int32_t token_id) {
  LMI_CHECK(logit_row >= 0 && logit_row < view_.num_logit_rows, "logit row ", logit_row);
  LMI_CHECK(token_id >= 0 && token_id < view_.sampling->vocab_size, "token id ", token_id);
  view_.target_ids[logit_row] = token_id;
}

void StepBuffer::add_copy(int32_t src_block, int32_t dst_block) {
  LMI_CHECK(view_.num_copies < view_.capacity.max_copies, "step already has ",
            view_.capacity.max_copies, " block copies");
  view_.copy_src[view_.num_copies] = src_block;
  view_.copy_dst[view_.num_copies] = dst_block;
  ++view_.num_copies;
}

void StepBuffer::follow(const StepBuffer& previous, std::vector<int32_t> logit_rows) {
  LMI_CHECK(&previous != this, "a step can't follow itself");
  LMI_CHECK(static_cast<int32_t>(logit_rows.size()) == view_.num_tokens, logit_rows.size(),
            " logit rows for ", view_.num_tokens, " tokens");
  for (const int32_t row : logit_rows) {
    LMI_CHECK(row >= -1 && row < previous.view_.num_logit_rows, "logit row ", row, " of ",
              previous.view_.num_logit_rows);
  }
  previous_ = &previous;
  previous_rows_ = std::move(logit_rows);
}

void StepBuffer::take_token(int32_t token_row, const StepBuffer& source, int32_t logit_row) {
  LMI_CHECK(&source != this, "a step can't follow itself");
  LMI_CHECK(token_row >= 0 && token_row < view_.num_tokens, "token row ", token_row, " of ",
            view_.num_tokens);
  LMI_CHECK(logit_row >= 0 && logit_row < source.view_.num_logit_rows, "logit row ", logit_row,
            " of ", source.view_.num_logit_rows);
  taken_.push_back({.token_row = token_row, .logit_row = logit_row, .source = &source});
}

void StepBuffer::take_tokens() {
  for (const TakenToken& taken : taken_) {
    const int32_t id = taken.source->view_.sampled_ids[taken.logit_row];
    view_.token_ids[taken.token_row] = id >= 0 && id < view_.sampling->vocab_size ? id : 0;
  }
  if (previous_ == nullptr) return;
  for (int32_t i = 0; i < view_.num_tokens; ++i) {
    const int32_t row = previous_rows_[i];
    if (row >= 0) view_.token_ids[i] = std::max(previous_->view_.sampled_ids[row], 0);
  }
  for (const int32_t row : counted_rows_) {
    const int32_t id = view_.token_ids[view_.logit_token_rows[row]];
    sampling_.rows[view_.sampling_rows[row]].observe({&id, 1});
  }
}

void StepBuffer::count_token(int32_t logit_row) {
  LMI_CHECK(logit_row >= 0 && logit_row < view_.num_logit_rows, "logit row ", logit_row);
  LMI_CHECK(view_.sampling_rows[logit_row] >= 0, "logit row ", logit_row, " samples nothing");
  counted_rows_.push_back(logit_row);
}

std::span<uint32_t> StepBuffer::add_mask(int32_t logit_row) {
  LMI_CHECK(logit_row >= 0 && logit_row < view_.num_logit_rows, "logit row ", logit_row);
  std::vector<uint32_t>& words = mask_memory_[logit_row];
  words.assign((view_.sampling->vocab_size + 31) / 32, 0);
  masks_[logit_row] = words.data();
  mask_ready_[logit_row] = 0;
  view_.masks = masks_.data();
  view_.mask_ready = mask_ready_.data();
  return words;
}

void StepBuffer::set_mask_ready(int32_t logit_row) {
  LMI_CHECK(logit_row >= 0 && logit_row < view_.num_logit_rows, "logit row ", logit_row);
  const std::atomic_ref<uint32_t> ready(mask_ready_[logit_row]);
  ready.store(1, std::memory_order_release);
  ready.notify_all();
}

void StepBuffer::set_masks_ready() {
  for (int32_t row = 0; row < view_.num_logit_rows; ++row) {
    if (masks_[row] != nullptr) set_mask_ready(row);
  }
}

void StepBuffer::set_result(int32_t logit_row, int32_t token_id, float logprob,
                            const std::vector<std::pair<int32_t, float>>& top,
                            int32_t target_rank) {
  LMI_CHECK(logit_row >= 0 && logit_row < view_.num_logit_rows, "logit row ", logit_row);
  view_.sampled_ids[logit_row] = token_id;
  view_.sampled_logprobs[logit_row] = logprob;
  view_.target_ranks[logit_row] = target_rank;
  const auto num_top =
      std::min<int32_t>(static_cast<int32_t>(top.size()), view_.capacity.max_logprobs);
  view_.num_top[logit_row] = num_top;
  const int64_t base = static_cast<int64_t>(logit_row) * view_.capacity.max_logprobs;
  for (int32_t i = 0; i < num_top; ++i) {
    view_.top_ids[base + i] = top[i].first;
    view_.top_logprobs[base + i] = top[i].second;
  }
}

}  // namespace lmi
