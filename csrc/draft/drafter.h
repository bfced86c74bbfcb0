// What one sequence may go on with: what followed the place in its text, or in texts of others,
// that is most like its end; or, where that is right more often, what most often followed its last
// few tokens.
//
// The place moves on with the text. What it says comes next is compared with each token that comes,
// drafted or not, so the share of right ones is known at no cost; it is kept by the length of the
// run of right ones before, for places in the text and in others. A place that was wrong once is
// kept, since a text may differ from the one before by a token, but for one that agrees with more
// of the last tokens.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "draft/token_index.h"

namespace lmi {

// What most often followed a text's last tokens, among the latest places that they were at.
struct Vote {
  int32_t token_id = -1;  // -1: nothing did
  bool is_own = false;    // in the text itself
  int32_t run = 0;        // equal tokens before all of these places, as far as is looked
  float share = 0.0f;     // of the places
  int32_t num_places = 0;
};

// How often guesses were right: by the run of right ones before, and by votes of their kind; what
// is older counts less.
class GuessRates {
 public:
  // memory: the weight of what was seen, a guess later.
  explicit GuessRates(float memory) : memory_(memory) {}

  // is_own: the place is in the text itself.
  void note(bool is_own, int32_t run, bool is_right);
  // That the next one behind such a run is right; first_chance is taken for granted before
  // anything was seen.
  float chance(bool is_own, int32_t run, float first_chance) const;
  void note(const Vote& vote, bool is_right) { rate_of(vote).note(is_right, memory_); }
  float chance(const Vote& vote) const;

 private:
  struct Rate {
    void note(bool is_right, float memory);
    float chance(float first_chance) const;

    float num_right = 0.0f;
    float num_seen = 0.0f;
  };
  static constexpr int kRuns = 6;
  static constexpr int kShares = 4;
  static constexpr int kCounts = 3;
  static size_t share_class(const Vote& vote);
  static size_t index_of(const Vote& vote);
  Rate& rate_of(const Vote& vote) { return vote_rates_[index_of(vote)]; }

  const float memory_;
  std::array<std::array<Rate, 5>, 2> rates_;
  std::array<Rate, static_cast<size_t>(2 * kRuns * kShares * kCounts)> vote_rates_;
};

struct Draft {
  std::vector<int32_t> token_ids;
  std::vector<float> chances;  // that this token and those before it are right
  bool is_voted = false;
};

class Drafter {
 public:
  // A place is looked for by min_match tokens and judged by max_match. rates: of all texts alike,
  // which a text's own rates start from; null where there are none.
  Drafter(int64_t max_tokens, int32_t min_match, int32_t max_match,
          std::shared_ptr<const TokenIndex> history, std::shared_ptr<GuessRates> rates);

  // The text's first tokens, which nobody had to guess.
  void start(std::span<const int32_t> token_ids);
  void extend(std::span<const int32_t> token_ids);

  int64_t num_tokens() const { return num_tokens_; }
  bool has_draft() const { return is_readable(place_) || vote_.token_id >= 0; }
  // What may follow the text and, behind it, the tokens of `behind`.
  Draft draft(int32_t max_tokens, std::span<const int32_t> behind = {}) const;
  // Of what will be drafted behind the next token, as far as is known before that comes.
  std::vector<float> next_chances(int32_t max_tokens) const;

 private:
  struct Place {
    const TokenIndex* index = nullptr;  // null: there is none
    int64_t position = 0;               // of the token that is to come next
    int32_t num_equal = 0;              // of the max_match tokens before it
    int32_t run = 0;                    // equal ones directly before it
  };
  void observe(int32_t token_id);
  // A place that agrees with more of `tail`, the last tokens, than this one; else this one.
  Place search(std::span<const int32_t> tail, const Place& present) const;
  void search(const TokenIndex& index, std::span<const int32_t> tail, Place& best) const;
  Place judge(const TokenIndex& index, int64_t position, std::span<const int32_t> tail) const;
  bool is_readable(const Place& place) const;
  float chance(const Place& place, int32_t run) const;
  // What follows the place, behind `behind` and the text.
  Draft follow(const Place& place, std::span<const int32_t> behind, int32_t max_tokens) const;
  Vote vote(std::span<const int32_t> tail) const;
  Vote vote(const TokenIndex& index, std::span<const int32_t> tail) const;
  // What is voted for behind `tail`, token by token.
  Draft follow_votes(std::vector<int32_t> tail, int32_t max_tokens) const;
  const GuessRates& vote_rates() const {
    return shared_rates_ == nullptr ? rates_ : *shared_rates_;
  }

  const int32_t min_match_;
  const int32_t max_match_;
  TokenIndex text_;
  const std::shared_ptr<const TokenIndex> history_;
  const std::shared_ptr<GuessRates> shared_rates_;
  int64_t num_tokens_ = 0;
  Place place_;
  Vote vote_;              // for what comes next
  int32_t num_wrong_ = 0;  // of the place, in a row
  GuessRates rates_;
};

}  // namespace lmi
