// Who attends to what in a step, worked out once on the host and used by every layer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cuda/host_device.h"
#include "cuda/lmi_cuda.h"

namespace lmi::cuda {

constexpr int kMinSplitTokens = 256;
constexpr int kSplitUnit = 64;      // keys that the decode kernel takes at once
constexpr int kMaxHeadDim = 256;    // of keys with values of their own
constexpr int kMaxLatentDim = 576;  // of keys that are the values, too
constexpr int kLatentRows = 64;
constexpr int kNarrowHeadDim = 64;

// Shared memory that a block takes at most, for narrow heads, as every GPU has it, and for others.
constexpr int kNarrowHeadBytes = 99 << 10;
constexpr int kWideHeadBytes = 132 << 10;

// Rows (tokens times query heads of a group) of a prefill tile: narrow heads leave the registers
// for more.
LMI_HOST_DEVICE constexpr int prefill_tile_rows(int head_dim) { return head_dim <= 128 ? 128 : 64; }

// Query heads of a KV head: a tile has a token's, but for latent heads, of which several tiles do.
constexpr int max_group(int head_dim) {
  return head_dim > kMaxHeadDim ? 1024 : prefill_tile_rows(head_dim);
}

// Tokens of a prefill tile, or of the tiles of one.
LMI_HOST_DEVICE constexpr int prefill_tile_tokens(int group, int head_dim) {
  return greater_of(prefill_tile_rows(head_dim) / group, 1);
}

// Of what runs at once, what a piece of a decode's keys takes. Of latent heads a block has as many
// rows as a tile, and takes the place of two blocks of others.
constexpr int slots_of_piece(int num_q_heads, int num_kv_heads, int head_dim) {
  return head_dim > kMaxHeadDim ? 2 * ceil_div(num_q_heads, kLatentRows) : num_kv_heads;
}

// The most keys that one block takes of a decode: an equal share, so that none runs long after the
// others, of whole units and not below kMinSplitTokens.
inline int32_t split_tokens_for(int64_t total_keys, int32_t num_slots, int32_t slots_of_piece) {
  const int64_t num_shares = greater_of(num_slots / slots_of_piece, 1);
  const int64_t share = ceil_div(total_keys, num_shares);
  return static_cast<int32_t>(
      round_up(greater_of<int64_t>(share, kMinSplitTokens), int64_t{kSplitUnit}));
}

struct AttentionLists {
  std::vector<LmiAttentionWork> decode;
  std::vector<LmiAttentionWork> prefill;
  int32_t num_partials = 0;
};

// Splits lie at absolute positions, multiples of their size, so that with a fixed split_tokens a
// sequence is reduced in the same order whatever else the step holds.
inline void list_decode(int32_t seq, int32_t begin, int32_t end, int32_t split_tokens,
                        AttentionLists& lists) {
  const int32_t first_split = begin / split_tokens;
  const int32_t num_splits = ceil_div(end, split_tokens) - first_split;
  const int32_t num_partials = num_splits > 1 ? num_splits : 0;
  for (int32_t i = 0; i < num_splits; ++i) {
    const int32_t split = first_split + i;
    lists.decode.push_back({seq, greater_of(begin, split * split_tokens),
                            lower_of(end, (split + 1) * split_tokens), lists.num_partials + i,
                            lists.num_partials, num_partials});
  }
  lists.num_partials += num_partials;
}

inline AttentionLists list_attention(const LmiAttentionLists& request) {
  AttentionLists lists;
  const auto first_key = [&](int32_t seq) {
    const int32_t length = request.kv_lengths[seq];
    return request.window > 0 ? greater_of(length - request.window, 0) : 0;
  };
  const auto is_decode = [&](int32_t seq) {
    return request.num_rows[seq] == 1 && request.prefills_all == 0;
  };
  int64_t total_keys = 0;
  for (int32_t seq = 0; seq < request.num_seqs; ++seq) {
    if (is_decode(seq)) total_keys += request.kv_lengths[seq] - first_key(seq);
  }
  const int32_t split_tokens =
      request.split_tokens > 0
          ? request.split_tokens
          : split_tokens_for(
                total_keys, request.num_slots,
                slots_of_piece(request.num_q_heads, request.num_kv_heads, request.head_dim));
  const int32_t group = request.num_q_heads / request.num_kv_heads;
  const int32_t tile_tokens = prefill_tile_tokens(group, request.head_dim);
  for (int32_t seq = 0; seq < request.num_seqs; ++seq) {
    const int32_t num_rows = request.num_rows[seq];
    if (is_decode(seq)) {
      list_decode(seq, first_key(seq), request.kv_lengths[seq], split_tokens, lists);
      continue;
    }
    for (int32_t first = 0; first < num_rows; first += tile_tokens) {
      lists.prefill.push_back({seq, first, lower_of(first + tile_tokens, num_rows), 0, 0, 0});
    }
  }
  // The longest first: what starts last should not take long.
  const auto num_keys = [](const LmiAttentionWork& work) { return work.end - work.begin; };
  std::stable_sort(lists.decode.begin(), lists.decode.end(),
                   [&](const auto& a, const auto& b) { return num_keys(a) > num_keys(b); });
  const auto last_key = [&](const LmiAttentionWork& work) {
    return request.kv_lengths[work.seq] - request.num_rows[work.seq] + work.end;
  };
  std::stable_sort(lists.prefill.begin(), lists.prefill.end(),
                   [&](const auto& a, const auto& b) { return last_key(a) > last_key(b); });
  return lists;
}

}  // namespace lmi::cuda
