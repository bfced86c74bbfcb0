#include <algorithm>
#include <random>
#include <vector>

#include "check.h"
#include "cuda/attention_lists.h"

namespace lmi::cuda {
namespace {

struct Sequences {
  std::vector<int32_t> num_rows;
  std::vector<int32_t> kv_lengths;
};

AttentionLists lists(const Sequences& sequences, int32_t window = 0, int32_t split_tokens = 0,
                     int32_t prefills_all = 0) {
  LmiAttentionLists request = {};
  request.num_rows = sequences.num_rows.data();
  request.kv_lengths = sequences.kv_lengths.data();
  request.num_seqs = static_cast<int32_t>(sequences.num_rows.size());
  request.num_q_heads = 32;
  request.num_kv_heads = 8;
  request.head_dim = 128;
  request.window = window;
  request.num_slots = 264;
  request.split_tokens = split_tokens;
  request.prefills_all = prefills_all;
  return list_attention(request);
}

TEST(attention_lists_prefills_rows_alone_where_asked_to) {
  const Sequences sequences{{1, 3, 1}, {500, 3, 1}};
  const AttentionLists found = lists(sequences, 0, 0, 1);
  EXPECT(found.decode.empty());
  EXPECT_EQ(found.num_partials, 0);
  EXPECT_EQ(found.prefill.size(), size_t{3});
  EXPECT_EQ(found.prefill[0].seq, 0);  // the longest first
  for (const LmiAttentionWork& work : found.prefill) {
    EXPECT_EQ(work.begin, 0);
    EXPECT_EQ(work.end, sequences.num_rows[static_cast<size_t>(work.seq)]);
  }
}

TEST(attention_lists_covers_every_key_once) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    Sequences sequences;
    const int num_seqs = static_cast<int>(random() % 20);
    for (int seq = 0; seq < num_seqs; ++seq) {
      const auto num_rows = static_cast<int32_t>(random() % 3 == 0 ? random() % 300 + 1 : 1);
      sequences.num_rows.push_back(num_rows);
      sequences.kv_lengths.push_back(num_rows + static_cast<int32_t>(random() % 9000));
    }
    const auto window = static_cast<int32_t>(round % 2 == 0 ? 0 : random() % 4000 + 1);
    const AttentionLists found = lists(sequences, window, round % 3 == 0 ? 256 : 0);
    std::vector<int> num_parts(static_cast<size_t>(found.num_partials));
    for (int seq = 0; seq < num_seqs; ++seq) {
      const int32_t length = sequences.kv_lengths[static_cast<size_t>(seq)];
      std::vector<LmiAttentionWork> parts;
      for (const LmiAttentionWork& work : found.decode) {
        if (work.seq == seq) parts.push_back(work);
      }
      if (sequences.num_rows[static_cast<size_t>(seq)] > 1) {
        EXPECT(parts.empty());
        continue;
      }
      std::sort(parts.begin(), parts.end(),
                [](const auto& a, const auto& b) { return a.begin < b.begin; });
      int32_t at = window > 0 ? std::max(length - window, 0) : 0;
      for (const LmiAttentionWork& part : parts) {
        EXPECT_EQ(part.begin, at);
        EXPECT(part.end > part.begin);
        at = part.end;
        if (part.num_partials > 0) ++num_parts[static_cast<size_t>(part.partial)];
      }
      EXPECT_EQ(at, length);
      for (size_t i = 0; i < parts.size(); ++i) {
        const bool is_split = parts.size() > 1;
        EXPECT_EQ(parts[i].num_partials, is_split ? int32_t(parts.size()) : 0);
        EXPECT_EQ(parts[i].first_partial, parts[0].first_partial);
        EXPECT_EQ(parts[i].partial, parts[0].first_partial + int32_t(i));  // in order of position
      }
    }
    for (const int count : num_parts) EXPECT_EQ(count, 1);
  }
}

TEST(attention_lists_covers_every_row_once) {
  const AttentionLists found = lists({{70, 1, 2, 32}, {70, 5, 900, 32}});
  std::vector<std::vector<int>> seen{
      std::vector<int>(70), {}, std::vector<int>(2), std::vector<int>(32)};
  for (const LmiAttentionWork& work : found.prefill) {
    EXPECT(work.end - work.begin <= 32);  // of 4 heads each
    for (int32_t row = work.begin; row < work.end; ++row) {
      ++seen.at(static_cast<size_t>(work.seq)).at(static_cast<size_t>(row));
    }
  }
  for (const auto& rows : seen) {
    for (const int count : rows) EXPECT_EQ(count, 1);
  }
  EXPECT_EQ(found.prefill.front().seq, 2);  // which has the most keys
}

// With a fixed size, splits do not depend on what else runs; without, no share is above the mean.
TEST(attention_lists_splits) {
  EXPECT_EQ(lists({{1}, {5000}}, 0, 512).decode.size(), 10u);
  const AttentionLists beside_another = lists({{1, 1}, {5000, 100000}}, 0, 512);
  const auto first = std::find_if(beside_another.decode.begin(), beside_another.decode.end(),
                                  [](const auto& work) { return work.seq == 0; });
  EXPECT_EQ(first->num_partials, 10);
  EXPECT_EQ(lists({{1}, {300}}, 100, 256).decode.size(), 2u);  // 200 .. 256 .. 300
  EXPECT_EQ(split_tokens_for(1000, 264, 8), 256);
  EXPECT_EQ(split_tokens_for(65536, 264, 8), 2048);
  EXPECT_EQ(split_tokens_for(65536, 4, 8), 65536);
  const AttentionLists mixed = lists({{1, 1, 1}, {64000, 500, 1}});
  EXPECT_EQ(mixed.decode.size(), 33u + 2u);
  EXPECT_EQ(mixed.decode.front().end - mixed.decode.front().begin, 1984);
}

// Tiles of 64 rows: several tokens of 16 latent heads, and a token of 128 in two blocks, of which a
// multiprocessor runs one at a time.
TEST(attention_lists_of_latent_heads) {
  EXPECT_EQ(prefill_tile_tokens(16, 576), 4);
  EXPECT_EQ(prefill_tile_tokens(128, 576), 1);
  EXPECT_EQ(slots_of_piece(16, 1, 576), 2);
  EXPECT_EQ(slots_of_piece(128, 1, 576), 4);
  EXPECT_EQ(slots_of_piece(128, 8, 128), 8);
}

}  // namespace
}  // namespace lmi::cuda
