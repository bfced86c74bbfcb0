// Owner of one step buffer's memory, and the calls that fill it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "graph/sampling_table.h"
#include "graph/step.h"
#include "kv/block_tables.h"

namespace lmi {

enum class LogitRows : uint8_t { kNone, kFirst, kLast, kAll, kDrafts };

// Times are CLOCK_MONOTONIC nanoseconds.
struct StepTimes {
  int64_t submitted_ns = 0;
  int64_t started_ns = 0;
  int64_t finished_ns = 0;
};

class StepBuffer {
 public:
  // tables and sampling are used where they are, not copied; they must outlive the buffer.
  StepBuffer(StepCapacity capacity, const BlockTables& tables, SamplingTable& sampling);
  StepBuffer(const StepBuffer&) = delete;
  StepBuffer& operator=(const StepBuffer&) = delete;

  void clear();

  // Appends a sequence's tokens at positions start, start + 1, ...; returns the first logit row or
  // -1. kLast samples after the last token with sampling_row; kAll also reports, for every other
  // row, the log-probability of the token that follows; kFirst is the first token's. kDrafts
  // samples after every token, of which all but the first are drafts. adapter_slot: -1: none.
  // num_first: tokens up to the second text of a pair; -1: there is none. num_drafts: of kLast, so
  // many tokens at the end are drafts.
  int32_t add(const int32_t* token_ids, int32_t num_tokens, int32_t start, int32_t table_row,
              int32_t sampling_row, LogitRows logits, int32_t adapter_slot = -1,
              int32_t num_first = -1, int32_t num_drafts = 0);
  // A token that isn't known yet for each of several sequences, at these positions; returns the
  // first one's logit row. Rows are of the block and the sampling table.
  int32_t add_following(const std::vector<int32_t>& starts, const std::vector<int32_t>& rows,
                        const std::vector<int32_t>& adapter_slots);
  void set_target(int32_t logit_row, int32_t token_id);
  void add_copy(int32_t src_block, int32_t dst_block);

  // The token ids are what these logit rows of a step that is executed before this one sample, a
  // row per token; 0 for a row that samples none; -1: the token is known. Filled in by
  // take_tokens(), just before this step runs; until then previous must stay as it is. A device's
  // worker takes them on the device instead.
  void follow(const StepBuffer& previous, std::vector<int32_t> logit_rows);
  // The same of one token row, whatever the others are; also 0 for an id beyond the vocabulary. The
  // step is executed before this one, and stays as it is until this one runs.
  void take_token(int32_t token_row, const StepBuffer& source, int32_t logit_row);
  void take_tokens();
  // take_tokens() also has the sampling row of a logit row observe the token before it, which is
  // known no sooner, and so nothing before follow().
  void count_token(int32_t logit_row);
  const std::vector<int32_t>& counted_rows() const { return counted_rows_; }
  // The logit rows of the step that it follows, one per token; null if it follows none.
  const int32_t* followed_rows() const {
    return previous_ == nullptr ? nullptr : previous_rows_.data();
  }

  // Restricts what a logit row samples to a mask, see StepView::masks: cleared words that may be
  // written until set_mask_ready, also while the step runs.
  std::span<uint32_t> add_mask(int32_t logit_row);
  void set_mask_ready(int32_t logit_row);
  void set_masks_ready();

  void set_result(int32_t logit_row, int32_t token_id, float logprob,
                  const std::vector<std::pair<int32_t, float>>& top, int32_t target_rank);

  const StepView& view() const { return view_; }

  StepTimes times;
  std::string error;      // why the step failed; empty when it didn't
  bool is_final = false;  // of an error: every later step of the model will fail too

 private:
  void add_adapter_rows(int32_t slot, int32_t first_row, int32_t num_rows);
  int32_t add_logit_row(int32_t token_row, int32_t sampling_row, int32_t sample_position,
                        int32_t num_drafts = 0);

  StepView view_;
  const BlockTables& tables_;
  SamplingTable& sampling_;
  std::unique_ptr<int32_t[]> memory_;
  const StepBuffer* previous_ = nullptr;
  std::vector<int32_t> previous_rows_;
  std::vector<int32_t> counted_rows_;
  struct TakenToken {
    int32_t token_row;
    int32_t logit_row;
    const StepBuffer* source;
  };
  std::vector<TakenToken> taken_;
  std::vector<std::vector<uint32_t>> mask_memory_;  // per logit row, allocated when first used
  std::vector<const uint32_t*> masks_;
  std::vector<uint32_t> mask_ready_;
};

}  // namespace lmi
