// A step's arrays in one piece of memory, laid out alike on the host and on the device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cuda/attention_lists.h"
#include "cuda/step_list.h"

namespace lmi::cuda {

constexpr int64_t kInputAlignment = 16;

// Layers whose attention is planned alike.
struct AttentionShape {
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t window;

  bool operator==(const AttentionShape& other) const {
    return num_q_heads == other.num_q_heads && num_kv_heads == other.num_kv_heads &&
           head_dim == other.head_dim && window == other.window;
  }
};

// Lengths of the arrays; those of a captured step are the most that its steps have.
struct StepCounts {
  struct Work {
    int32_t num_decode = 0;
    int32_t num_prefill = 0;
  };

  int32_t num_tokens = 0;
  int32_t num_seqs = 0;
  int32_t num_logit_rows = 0;
  int32_t num_copies = 0;
  int32_t table_columns = 0;
  int32_t num_lora_tiles = 0;
  std::vector<Work> work;  // of each attention shape
};

struct StepInputs {
  struct Work {
    LmiAttentionWork* decode = nullptr;
    LmiAttentionWork* prefill = nullptr;
  };

  int32_t* token_ids = nullptr;
  int32_t* positions = nullptr;
  int32_t* slots = nullptr;
  int32_t* followed_rows = nullptr;
  int32_t* first_rows = nullptr;
  int32_t* num_rows = nullptr;
  int32_t* kv_lengths = nullptr;
  int32_t* block_tables = nullptr;
  int32_t* logit_token_rows = nullptr;
  int32_t* copy_src = nullptr;
  int32_t* copy_dst = nullptr;
  LmiLoraTile* lora_tiles = nullptr;
  LmiSampleRow* sample_rows = nullptr;
  std::vector<Work> work;
  int64_t num_bytes = 0;

  StepInputs(const StepCounts& counts, void* memory) {
    auto* next = static_cast<uint8_t*>(memory);
    const auto take = [&](auto*& array, int64_t count) {
      using T = std::remove_reference_t<decltype(*array)>;
      array = memory == nullptr ? nullptr : reinterpret_cast<T*>(next + num_bytes);
      num_bytes += round_up<int64_t>(count * int64_t{sizeof(T)}, kInputAlignment);
    };
    for (int32_t** array : {&token_ids, &positions, &slots, &followed_rows}) {
      take(*array, counts.num_tokens);
    }
    for (int32_t** array : {&first_rows, &num_rows, &kv_lengths}) take(*array, counts.num_seqs);
    take(block_tables, int64_t{counts.num_seqs} * counts.table_columns);
    take(logit_token_rows, counts.num_logit_rows);
    take(copy_src, counts.num_copies);
    take(copy_dst, counts.num_copies);
    take(lora_tiles, counts.num_lora_tiles);
    take(sample_rows, counts.num_logit_rows);
    for (const StepCounts::Work& lengths : counts.work) {
      Work& lists = work.emplace_back();
      take(lists.decode, lengths.num_decode);
      take(lists.prefill, lengths.num_prefill);
    }
  }
};

// Entries of the longest decode list of any step of so many sequences with up to so many keys: a
// sequence has a split for each that its keys fill, and one begun at either end.
inline int32_t most_decode_work(const AttentionShape& shape, const LmiStepSizes& sizes,
                                int32_t num_seqs, int64_t num_keys) {
  if (sizes.split_tokens > 0) {
    return static_cast<int32_t>(num_seqs * (num_keys / sizes.split_tokens + 2));
  }
  const int32_t slots = slots_of_piece(shape.num_q_heads, shape.num_kv_heads, shape.head_dim);
  return greater_of(sizes.num_attention_slots / slots, 1) + 2 * num_seqs;
}

// Who attends to what; the lengths are of the arrays' host side, and must outlive the call.
inline AttentionLists list_step(const AttentionShape& shape, const LmiStepSizes& sizes,
                                const int32_t* num_rows, const int32_t* kv_lengths,
                                int32_t num_seqs) {
  LmiAttentionLists request = {};
  request.num_rows = num_rows;
  request.kv_lengths = kv_lengths;
  request.num_seqs = num_seqs;
  request.num_q_heads = shape.num_q_heads;
  request.num_kv_heads = shape.num_kv_heads;
  request.head_dim = shape.head_dim;
  request.window = shape.window;
  request.num_slots = sizes.num_attention_slots;
  request.split_tokens = sizes.split_tokens;
  return list_attention(request);
}

// The rest of `capacity` entries is no work.
template <typename Entry>
void copy_work(const std::vector<Entry>& entries, int32_t capacity, Entry* target) {
  std::copy(entries.begin(), entries.end(), target);
  std::fill(target + entries.size(), target + capacity, Entry{});
}

}  // namespace lmi::cuda
