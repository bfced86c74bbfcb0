#include "draft/drafter.h"

#include <algorithm>
#include <utility>

#include "common/check.h"

namespace lmi {
namespace {

constexpr int kMaxCandidates = 32;  // places of a text that are judged
constexpr int32_t kMaxWrong = 3;    // in a row, then a place is given up
constexpr float kMemory = 0.9f;     // of a text's own rates
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

}  // namespace

void GuessRates::note(int32_t run, bool is_right) {
  Rate& rate = rates_[run_class(run)];
  rate.num_right = rate.num_right * memory_ + (is_right ? 1.0f : 0.0f);
  rate.num_seen = rate.num_seen * memory_ + 1.0f;
}

float GuessRates::chance(int32_t run, float first_chance) const {
  const Rate& rate = rates_[run_class(run)];
  return (rate.num_right + first_chance * kFirstWeight) / (rate.num_seen + kFirstWeight);
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
  search();
}

void Drafter::extend(std::span<const int32_t> token_ids) {
  for (const int32_t id : token_ids) observe(id);
}

void Drafter::observe(int32_t token_id) {
  const bool has_place = is_readable(place_);
  const bool is_right = has_place && place_.index->at(place_.position) == token_id;
  if (has_place) {
    rates_.note(place_.run, is_right);
    if (shared_rates_ != nullptr) shared_rates_->note(place_.run, is_right);
  }
  text_.append({&token_id, 1});
  ++num_tokens_;
  num_wrong_ = is_right ? 0 : num_wrong_ + 1;
  if (has_place && num_wrong_ < kMaxWrong) {
    place_ = judge(*place_.index, place_.position + 1);
  } else {
    place_ = {};
  }
  if (!is_right) search();
}

// Takes a place that agrees with more of the last tokens than the present one.
void Drafter::search() {
  if (text_.end() - text_.begin() < min_match_) return;
  std::vector<int32_t> key(static_cast<size_t>(min_match_));
  for (int32_t i = 0; i < min_match_; ++i) {
    key[static_cast<size_t>(i)] = text_.at(text_.end() - min_match_ + i);
  }
  Place best = place_;
  search(text_, key, best);
  if (history_ != nullptr) search(*history_, key, best);
  if (best.index != place_.index || best.position != place_.position) num_wrong_ = 0;
  place_ = best;
}

void Drafter::search(const TokenIndex& index, std::span<const int32_t> key, Place& best) const {
  int64_t position = index.find(key);
  for (int i = 0; i < kMaxCandidates && position >= 0; ++i) {
    const Place place = judge(index, position);
    const bool is_match = place.run >= min_match_;
    if (is_match && (best.index == nullptr || place.num_equal > best.num_equal)) best = place;
    position = index.find_before(position);
  }
}

Drafter::Place Drafter::judge(const TokenIndex& index, int64_t position) const {
  Place place = {&index, position, 0, 0};
  const int64_t count =
      std::min({int64_t{max_match_}, position - index.begin(), text_.end() - text_.begin()});
  bool is_run = true;
  for (int64_t i = 1; i <= count; ++i) {
    const int32_t token_id = index.at(position - i);
    if (token_id == TokenIndex::kTextEnd) break;
    const bool is_equal = token_id == text_.at(text_.end() - i);
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

Draft Drafter::draft(int32_t max_tokens) const {
  Draft draft;
  if (!is_readable(place_)) return draft;
  float chance_so_far = 1.0f;
  for (int32_t i = 0; i < max_tokens; ++i) {
    const int64_t position = place_.position + i;
    int32_t token_id = TokenIndex::kTextEnd;
    if (position < place_.index->end()) {
      token_id = place_.index->at(position);
    } else if (place_.index == &text_) {  // a text that repeats itself goes on with the draft
      token_id = draft.token_ids[static_cast<size_t>(position - text_.end())];
    }
    if (token_id == TokenIndex::kTextEnd) break;
    chance_so_far *= chance(place_.run + i);
    draft.token_ids.push_back(token_id);
    draft.chances.push_back(chance_so_far);
  }
  return draft;
}

float Drafter::next_chance() const {
  if (!is_readable(place_)) return 0.0f;
  const float is_right = chance(place_.run);
  return is_right * chance(place_.run + 1) + (1.0f - is_right) * chance(0);
}

float Drafter::chance(int32_t run) const {
  float first = kFirstChances[run_class(run)];
  if (shared_rates_ != nullptr) first = shared_rates_->chance(run, first);
  return rates_.chance(run, first);
}

}  // namespace lmi
