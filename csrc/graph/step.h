// The step buffer: the only thing that passes between the engine's loop and a device's worker.
//
// The loop fills it, the worker reads it and writes the results; between submit and completion
// nobody else touches it. Capacities are fixed at start; everything variable is a count inside.
#pragma once

#include <cstdint>

namespace lmi {

struct SamplingTable;

// Sizes fixed at start.
struct StepCapacity {
  int32_t max_tokens = 0;          // rows of one step (symbol T)
  int32_t max_seqs = 0;            // sequences of one step (symbol S)
  int32_t max_logit_rows = 0;      // rows whose logits are computed (symbol L)
  int32_t max_logprobs = 0;        // top-n reported per logit row
  int32_t max_copies = 0;          // block copies before the forward pass
  int32_t max_blocks_per_seq = 0;  // columns of block_tables
  int32_t block_size = 0;          // tokens per KV block
};

// What kernels see. Plain pointers into one allocation that StepBuffer (step_buffer.h) owns.
struct StepView {
  StepCapacity capacity;

  int32_t num_tokens = 0;
  int32_t num_seqs = 0;
  int32_t num_logit_rows = 0;
  int32_t num_copies = 0;
  int32_t num_adapter_runs = 0;

  // Per token, [num_tokens].
  int32_t* token_ids = nullptr;
  int32_t* positions = nullptr;    // absolute position in its sequence, from 0
  int32_t* token_types = nullptr;  // 1 for tokens of the second text of a pair
  int32_t* slots = nullptr;        // block_id * block_size + offset: where its K and V go

  // Per sequence, [num_seqs]; a sequence's rows are contiguous and in position order.
  int32_t* first_rows = nullptr;  // index of its first token row
  int32_t* num_rows = nullptr;    // its token rows in this step
  int32_t* kv_lengths = nullptr;  // tokens in the cache after this step, its own rows included
  int32_t* table_rows = nullptr;  // its row in block_tables
  const int32_t* block_tables = nullptr;  // [rows, max_blocks_per_seq] block ids

  // Runs of token rows with the same LoRA adapter, [num_adapter_runs], in order; the rows of other
  // sequences have none.
  int32_t* adapter_first_rows = nullptr;
  int32_t* adapter_num_rows = nullptr;
  int32_t* adapter_slots = nullptr;

  // Per logit row, [num_logit_rows].
  int32_t* logit_token_rows = nullptr;  // the token row it is computed from
  int32_t* sampling_rows = nullptr;     // row of the sampling table (also says the top-n), or -1
  int32_t* sample_positions = nullptr;  // of the sampled token: the RNG's counter
  int32_t* target_ids = nullptr;        // >= 0: report this token's log-probability instead
  // So many token rows, up to the one it is computed from, are drafts: the row samples as it will
  // once the sequence has generated them.
  int32_t* num_drafts = nullptr;
  const SamplingTable* sampling = nullptr;
  // Tokens that a row may sample, a bit per id, lowest first; null: all of them. The loop fills a
  // mask while the step runs and then sets its flag, for which sample waits. Both are null in a
  // step without masks.
  const uint32_t* const* masks = nullptr;
  const uint32_t* mask_ready = nullptr;  // 0 or 1, accessed atomically

  // Copies of whole blocks (all layers) done before the forward pass, [num_copies].
  int32_t* copy_src = nullptr;
  int32_t* copy_dst = nullptr;

  // Results, per logit row.
  int32_t* sampled_ids = nullptr;  // -1 where nothing was sampled
  // Of the sampled or target token, unmodified distribution; 0 where the row reports none.
  float* sampled_logprobs = nullptr;
  // The target's place among all tokens, the likeliest being 1; 0 where there is no target, or its
  // device doesn't count.
  int32_t* target_ranks = nullptr;
  int32_t* num_top = nullptr;
  int32_t* top_ids = nullptr;     // [num_logit_rows, max_logprobs], best first
  float* top_logprobs = nullptr;  // likewise
};

}  // namespace lmi
