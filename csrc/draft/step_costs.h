// What steps take by their number of rows, as measured while they run, and how deep drafts pay.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace lmi {

// Means of the last steps, with straight lines between the numbers of rows that were seen.
class StepCosts {
 public:
  // A step was executed.
  void note(int32_t num_rows, double seconds);
  // So long after a step the next one began; ahead: it was submitted before.
  void note_gap(double seconds, bool ahead);

  bool is_known() const { return !sizes_.empty(); }
  // From the end of a step to that of the next, which has so many rows; 0 before anything is known.
  double seconds(int32_t num_rows, bool ahead) const;

  // How many drafts of each sequence bring most tokens a second, at most so many together, in a
  // step of num_rows rows and num_tokens tokens without. chances: of each sequence, that its drafts
  // are right, in falling order. ahead: a step without drafts is submitted before the last one's
  // tokens are known. None where no step of num_rows rows was measured lately, though others were:
  // what drafts are worth would never be known while they go on.
  std::vector<int32_t> depths(int32_t num_rows, double num_tokens,
                              std::span<const std::vector<float>> chances, int32_t most,
                              bool ahead) const;

  // The same for drafts of a model, whose steps cost what `drafting` says: of each sequence equally
  // many, at most `deepest`. chances: of each sequence, that a draft is right behind right ones.
  // extra_s: what drafting takes beside, a token.
  int32_t common_depth(const StepCosts& drafting, std::span<const float> chances, int32_t num_rows,
                       double num_tokens, int32_t deepest, double extra_s, bool ahead) const;

 private:
  struct Size {
    int32_t num_rows = 0;
    double seconds = 0.0;
    int64_t last = 0;  // number of the last such step
  };
  using Points = std::vector<std::pair<int32_t, double>>;  // rows, seconds
  Points points() const;
  bool is_recent(const Size& size) const;
  bool was_measured(int32_t num_rows) const;
  double gap(bool ahead) const { return gaps_[ahead ? 1 : 0]; }

  std::vector<Size> sizes_;  // by rows
  int64_t num_steps_ = 0;
  double gaps_[2] = {0.0, 0.0};  // of steps that wait for the last one's tokens, and that don't
};

}  // namespace lmi
