#include "draft/step_costs.h"

#include <algorithm>
#include <bit>

#include "common/check.h"

namespace lmi {
namespace {

constexpr double kWeight = 0.2;      // of the newest of several measurements of alike steps
constexpr int64_t kMaxAge = 1000;    // steps after which what was measured may be another load's
constexpr double kFirstSlope = 0.1;  // cost of one more row in steps of one, until others were seen
constexpr int32_t kNumExact = 16;  // larger numbers of rows are counted in classes an eighth apart
constexpr float kLeastChance = 0.05f;  // of a draft, that it is worth thinking about

int32_t size_class(int32_t num_rows) {
  if (num_rows <= kNumExact) return num_rows;
  const int32_t width = 1 << (std::bit_width(static_cast<uint32_t>(num_rows)) - 4);
  return num_rows / width * width + width / 2;
}

// On the lines through these points.
double seconds_at(std::span<const std::pair<int32_t, double>> points, int32_t num_rows) {
  const auto above = std::find_if(points.begin(), points.end(),
                                  [&](const auto& point) { return point.first >= num_rows; });
  if (above == points.begin()) return points.front().second;
  const auto& [low, low_s] = *(above - 1);
  if (above != points.end()) {
    return low_s + (above->second - low_s) * (num_rows - low) / (above->first - low);
  }
  double slope = kFirstSlope * low_s / low;
  if (points.size() > 1) slope = (low_s - points.front().second) / (low - points.front().first);
  return low_s + slope * (num_rows - low);
}

}  // namespace

void StepCosts::note(int32_t num_rows, double seconds) {
  LMI_CHECK(num_rows > 0, "a step of ", num_rows, " rows");
  ++num_steps_;
  const int32_t size = size_class(num_rows);
  auto found = std::lower_bound(sizes_.begin(), sizes_.end(), size,
                                [](const Size& one, int32_t rows) { return one.num_rows < rows; });
  if (found == sizes_.end() || found->num_rows != size) {
    found = sizes_.insert(found, {size, seconds, 0});
  }
  found->seconds += kWeight * (seconds - found->seconds);
  found->last = num_steps_;
}

void StepCosts::note_gap(double seconds, bool ahead) {
  double& mean = gaps_[ahead ? 1 : 0];
  mean += kWeight * (std::max(0.0, seconds) - mean);
}

bool StepCosts::is_recent(const Size& size) const { return size.last >= num_steps_ - kMaxAge; }

bool StepCosts::was_measured(int32_t num_rows) const {
  return std::any_of(sizes_.begin(), sizes_.end(), [&](const Size& size) {
    return size.num_rows == size_class(num_rows) && is_recent(size);
  });
}

// More rows never take less: a single step that was held up says nothing of its number of rows.
StepCosts::Points StepCosts::points() const {
  Points points;
  for (const Size& size : sizes_) {
    if (is_recent(size)) points.emplace_back(size.num_rows, size.seconds);
  }
  for (size_t i = points.size(); i-- > 1;) {
    points[i - 1].second = std::min(points[i - 1].second, points[i].second);
  }
  return points;
}

double StepCosts::seconds(int32_t num_rows, bool ahead) const {
  return is_known() ? seconds_at(points(), num_rows) + gap(ahead) : 0.0;
}

std::vector<int32_t> StepCosts::depths(int32_t num_rows, double num_tokens,
                                       std::span<const std::vector<float>> chances, int32_t most,
                                       bool ahead) const {
  // A sequence's chances fall, so those that are chosen are its first ones.
  std::vector<std::pair<float, size_t>> order;
  for (size_t i = 0; i < chances.size(); ++i) {
    for (const float chance : chances[i]) {
      if (chance > kLeastChance) order.emplace_back(chance, i);
    }
  }
  std::vector<int32_t> depths(chances.size(), 0);
  if (order.empty() || most <= 0 || (is_known() && !was_measured(num_rows))) return depths;
  std::stable_sort(order.begin(), order.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  order.resize(std::min(order.size(), static_cast<size_t>(most)));
  size_t best = order.size();
  if (is_known()) {
    const Points known = points();
    double best_rate = num_tokens / (seconds_at(known, num_rows) + gap(ahead));
    double expected = num_tokens;
    best = 0;
    for (size_t count = 1; count <= order.size(); ++count) {
      expected += static_cast<double>(order[count - 1].first);
      const int32_t rows = num_rows + static_cast<int32_t>(count);
      const double rate = expected / (seconds_at(known, rows) + gap(false));
      if (rate > best_rate) {
        best = count;
        best_rate = rate;
      }
    }
  }
  for (size_t i = 0; i < best; ++i) ++depths[order[i].second];
  return depths;
}

int32_t StepCosts::common_depth(const StepCosts& drafting, std::span<const float> chances,
                                int32_t num_rows, double num_tokens, int32_t deepest,
                                double extra_s, bool ahead) const {
  if (chances.empty() || deepest <= 0) return 0;
  if (is_known() && !was_measured(num_rows)) return 0;
  if (!is_known() || !drafting.is_known()) return deepest;
  const auto count = static_cast<int32_t>(chances.size());
  const Points known = points();
  const double round_s = drafting.seconds(count, true);
  double best_rate = num_tokens / (seconds_at(known, num_rows) + gap(ahead));
  double expected = num_tokens;
  int32_t best = 0;
  std::vector<float> powers(chances.begin(), chances.end());
  for (int32_t depth = 1; depth <= deepest; ++depth) {
    for (const float power : powers) expected += static_cast<double>(power);
    const double step_s = seconds_at(known, num_rows + depth * count) + gap(false);
    const double rate = expected / (step_s + depth * round_s + extra_s * expected);
    if (rate > best_rate) {
      best = depth;
      best_rate = rate;
    }
    for (size_t i = 0; i < powers.size(); ++i) powers[i] *= chances[i];
  }
  return best;
}

}  // namespace lmi
