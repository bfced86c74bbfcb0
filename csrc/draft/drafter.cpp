#include "draft/drafter.h"

#include <algorithm>
#include <utility>

#include "common/check.h"

namespace lmi {
namespace {

constexpr int kMaxCandidates = 32;  // places of a text that are judged
constexpr int32_t kMaxWrong = 3;    // in a row, then a place is given up
constexpr float kMemory = 0.9f;     // of a text's own rates
constexpr int32_t kVoteRun = 6;     // tokens before a place that its vote is judged by
// Of what a vote has a share of: of less than 0.4 of the places, 0.7, 0.95, and of nearly all.
constexpr std::array<float, 4> kFirstVoteChances = {0.2f, 0.4f, 0.6f, 0.75f};
constexpr float kLeastVoteChance = 0.05f;  // of all tokens so far, that more of them are guessed
// What is taken for granted before anything was seen, behind runs of 0, 1, 4, 8 and 16 tokens, with
// the weight of so many tokens.
constexpr std::array<float, 5> kFirstChances = {0.2f, 0.4f, 0.6f, 0.8f, 0.95f};
constexpr float kFirstWeight = 2.0f;

size_t run_class(int32_t run) {
  if (run >= 16) return 4;
  if (run >= 8) return 3;
  if (run >= 4) return 2;
  return run >= 1 ? 1 : 0;
}

// Tokens directly before a position that are the last ones of `tail`, `most` of them at most.
int32_t run_before(const TokenIndex& index, int64_t position, std::span<const int32_t> tail,
                   int32_t most) {
  const int64_t count = std::min<int64_t>(position - index.begin(), most);
  int32_t run = 0;
  while (run < count &&
         index.at(position - run - 1) == tail[static_cast<size_t>(std::ssize(tail) - run - 1)]) {
    ++run;
  }
  return run;
}

}  // namespace

void GuessRates::Rate::note(bool is_right, float memory) {
  num_right = num_right * memory + (is_right ? 1.0f : 0.0f);
  num_seen = num_seen * memory + 1.0f;
}

float GuessRates::Rate::chance(float first_chance) const {
  return (num_right + first_chance * kFirstWeight) / (num_seen + kFirstWeight);
}

void GuessRates::note(bool is_own, int32_t run, bool is_right) {
  rates_[is_own ? 1 : 0][run_class(run)].note(is_right, memory_);
}

float GuessRates::chance(bool is_own, int32_t run, float first_chance) const {
  return rates_[is_own ? 1 : 0][run_class(run)].chance(first_chance);
}

float GuessRates::chance(const Vote& vote) const {
  return vote_rates_[index_of(vote)].chance(kFirstVoteChances[share_class(vote)]);
}

size_t GuessRates::share_class(const Vote& vote) {
  if (vote.share >= 0.95f) return 3;
  if (vote.share > 0.7f) return 2;
  return vote.share > 0.4f ? 1 : 0;
}

size_t GuessRates::index_of(const Vote& vote) {
  const auto run = static_cast<size_t>(std::clamp(vote.run, 1, kRuns) - 1);
  const size_t count = vote.num_places >= 8 ? 2 : vote.num_places >= 3 ? 1 : 0;
  const size_t own = vote.is_own ? 1 : 0;
  return ((own * kRuns + run) * kShares + share_class(vote)) * kCounts + count;
}

Drafter::Drafter(int64_t max_tokens, int32_t min_match, int32_t max_match,
                 std::shared_ptr<const TokenIndex> history, std::shared_ptr<GuessRates> rates)
    : min_match_(min_match),
      max_match_(max_match),
      text_(max_tokens, min_match),
      history_(std::move(history)),
      shared_rates_(std::move(rates)),
      rates_(kMemory) {
  LMI_CHECK(min_match <= max_match, "matches of ", min_match, " to ", max_match, " tokens");
}

void Drafter::start(std::span<const int32_t> token_ids) {
  text_.append(token_ids);
  num_tokens_ += std::ssize(token_ids);
  place_ = search(text_.last(max_match_), place_);
  vote_ = vote(text_.last(max_match_));
}

void Drafter::extend(std::span<const int32_t> token_ids) {
  for (const int32_t id : token_ids) observe(id);
}

void Drafter::observe(int32_t token_id) {
  const bool has_place = is_readable(place_);
  const bool is_right = has_place && place_.index->at(place_.position) == token_id;
  if (has_place) {
    const bool is_own = place_.index == &text_;
    rates_.note(is_own, place_.run, is_right);
    if (shared_rates_ != nullptr) shared_rates_->note(is_own, place_.run, is_right);
  }
  if (vote_.token_id >= 0) {
    GuessRates& rates = shared_rates_ == nullptr ? rates_ : *shared_rates_;
    rates.note(vote_, vote_.token_id == token_id);
  }
  text_.append({&token_id, 1});
  ++num_tokens_;
  num_wrong_ = is_right ? 0 : num_wrong_ + 1;
  const std::span<const int32_t> tail = text_.last(max_match_);
  vote_ = vote(tail);
  if (has_place && num_wrong_ < kMaxWrong) {
    place_ = judge(*place_.index, place_.position + 1, tail);
  } else {
    place_ = {};
  }
  if (is_right) return;
  const Place best = search(tail, place_);
  if (best.index != place_.index || best.position != place_.position) num_wrong_ = 0;
  place_ = best;
}

Drafter::Place Drafter::search(std::span<const int32_t> tail, const Place& present) const {
  Place best = present;
  if (std::ssize(tail) < min_match_) return best;
  search(text_, tail, best);
  if (history_ != nullptr) search(*history_, tail, best);
  return best;
}

void Drafter::search(const TokenIndex& index, std::span<const int32_t> tail, Place& best) const {
  int64_t position = index.find(tail.last(static_cast<size_t>(min_match_)));
  for (int i = 0; i < kMaxCandidates && position >= 0; ++i) {
    const Place place = judge(index, position, tail);
    const bool is_match = place.run >= min_match_;
    if (is_match && (best.index == nullptr || place.num_equal > best.num_equal)) best = place;
    position = index.find_before(position);
  }
}

Drafter::Place Drafter::judge(const TokenIndex& index, int64_t position,
                              std::span<const int32_t> tail) const {
  Place place = {&index, position, 0, 0};
  const int64_t count = std::min(position - index.begin(), std::ssize(tail));
  bool is_run = true;
  for (int64_t i = 1; i <= count; ++i) {
    const int32_t token_id = index.at(position - i);
    if (token_id == TokenIndex::kTextEnd) break;
    const bool is_equal = token_id == tail[static_cast<size_t>(std::ssize(tail) - i)];
    is_run = is_run && is_equal;
    place.num_equal += is_equal ? 1 : 0;
    place.run += is_run ? 1 : 0;
  }
  return place;
}

bool Drafter::is_readable(const Place& place) const {
  return place.index != nullptr && place.position >= place.index->begin() &&
         place.position < place.index->end() &&
         place.index->at(place.position) != TokenIndex::kTextEnd;
}

Draft Drafter::draft(int32_t max_tokens, std::span<const int32_t> behind) const {
  Place place = place_;
  Vote first = vote_;
  const std::span<const int32_t> last = text_.last(max_match_);
  std::vector<int32_t> tail(last.begin(), last.end());
  if (!behind.empty()) {
    tail.insert(tail.end(), behind.begin(), behind.end());
    const std::span<const int32_t> end =
        std::span(tail).last(std::min(tail.size(), static_cast<size_t>(max_match_)));
    place = search(end, {});
    first = vote(end);
  }
  const float followed = is_readable(place) ? chance(place, place.run) : 0.0f;
  if (first.token_id >= 0 && vote_rates().chance(first) > followed) {
    Draft voted = follow_votes(std::move(tail), max_tokens);
    // Other texts may have taken the place of what the vote was of.
    if (!voted.token_ids.empty()) return voted;
  }
  return follow(place, behind, max_tokens);
}

Draft Drafter::follow(const Place& place, std::span<const int32_t> behind,
                      int32_t max_tokens) const {
  Draft draft;
  if (!is_readable(place)) return draft;
  std::vector<int32_t> ids(behind.begin(), behind.end());
  float chance_so_far = 1.0f;
  for (int32_t i = 0; i < max_tokens; ++i) {
    const int64_t position = place.position + i;
    int32_t token_id = TokenIndex::kTextEnd;
    if (position < place.index->end()) {
      token_id = place.index->at(position);
    } else if (place.index == &text_) {  // a text that repeats itself goes on with the draft
      token_id = ids[static_cast<size_t>(position - text_.end())];
    }
    if (token_id == TokenIndex::kTextEnd) break;
    chance_so_far *= chance(place, place.run + i);
    ids.push_back(token_id);
    draft.chances.push_back(chance_so_far);
  }
  draft.token_ids.assign(ids.begin() + std::ssize(behind), ids.end());
  return draft;
}

Draft Drafter::follow_votes(std::vector<int32_t> tail, int32_t max_tokens) const {
  Draft draft;
  draft.is_voted = true;
  float chance_so_far = 1.0f;
  while (std::ssize(draft.token_ids) < max_tokens) {
    const Vote next =
        vote(std::span(tail).last(std::min(tail.size(), static_cast<size_t>(max_match_))));
    if (next.token_id < 0) break;
    chance_so_far *= vote_rates().chance(next);
    if (chance_so_far < kLeastVoteChance && !draft.token_ids.empty()) break;
    tail.push_back(next.token_id);
    draft.token_ids.push_back(next.token_id);
    draft.chances.push_back(chance_so_far);
  }
  return draft;
}

Vote Drafter::vote(std::span<const int32_t> tail) const {
  if (std::ssize(tail) < min_match_) return {};
  const Vote own = vote(text_, tail);
  const Vote others = history_ == nullptr ? Vote() : vote(*history_, tail);
  if (own.token_id < 0) return others;
  if (others.token_id < 0) return own;
  return vote_rates().chance(others) > vote_rates().chance(own) ? others : own;
}

Vote Drafter::vote(const TokenIndex& index, std::span<const int32_t> tail) const {
  Vote best;
  best.is_own = &index == &text_;
  const int32_t most = std::min(std::max(kVoteRun, min_match_), static_cast<int32_t>(tail.size()));
  std::array<std::pair<int32_t, int32_t>, kMaxCandidates> counts;  // of tokens, the latest first
  size_t num_counts = 0;
  int64_t position = index.find(tail.last(static_cast<size_t>(min_match_)));
  for (int i = 0; i < kMaxCandidates && position >= 0; ++i) {
    const int32_t run = run_before(index, position, tail, most);
    const bool is_end = position >= index.end() || index.at(position) == TokenIndex::kTextEnd;
    if (!is_end && run >= min_match_ && run >= best.run) {
      if (run > best.run) num_counts = 0;
      best.run = run;
      const int32_t token_id = index.at(position);
      size_t k = 0;
      while (k < num_counts && counts[k].first != token_id) ++k;
      if (k == num_counts) counts[num_counts++] = {token_id, 0};
      ++counts[k].second;
    }
    position = index.find_before(position);
  }
  int32_t most_places = 0;
  for (size_t k = 0; k < num_counts; ++k) {
    best.num_places += counts[k].second;
    if (counts[k].second <= most_places) continue;
    most_places = counts[k].second;
    best.token_id = counts[k].first;
  }
  best.share = static_cast<float>(most_places) / static_cast<float>(std::max(1, best.num_places));
  return best;
}

std::vector<float> Drafter::next_chances(int32_t max_tokens) const {
  const auto [token_ids, chances, is_voted] = draft(max_tokens + 1);
  if (chances.size() < 2) return {};
  std::vector<float> next(chances.begin() + 1, chances.end());
  // A place that was wrong is kept; what will be voted for then isn't known.
  if (!is_voted) next.front() += (1.0f - chances.front()) * chance(place_, 0);
  return next;
}

float Drafter::chance(const Place& place, int32_t run) const {
  const bool is_own = place.index == &text_;
  float first = kFirstChances[run_class(run)];
  if (shared_rates_ != nullptr) first = shared_rates_->chance(is_own, run, first);
  return rates_.chance(is_own, run, first);
}

}  // namespace lmi
