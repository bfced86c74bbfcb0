// Ranks: processes that compute one model together, each with a slice of every layer's weights.
//
// They map the same memory: the step that rank 0 hands out, what each rank's products gave, and the
// logits. Nothing is sent; ranks meet before sums. Sums over ranks go in the order of ranks whoever
// came first, so bits don't depend on timing. A rank that waits spins briefly and then sleeps on a
// futex; one that was lost ends all waits.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "common/check.h"
#include "graph/step.h"

namespace lmi {

constexpr int32_t kMaxRanks = 64;

struct RankSizes {
  int32_t num_ranks = 0;
  StepCapacity capacity;
  int64_t num_columns = 0;  // of what is summed
  int64_t vocab_size = 0;
};

// A process without which no step is right again.
class LostRankError : public FinalError {
 public:
  using FinalError::FinalError;
};

class RankGroup {
 public:
  // descriptor: rank 0's, of which this is another mapping; -1: new memory. Throws Error.
  RankGroup(const RankSizes& sizes, int32_t rank, int descriptor);
  ~RankGroup();
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  const RankSizes& sizes() const { return sizes_; }
  int32_t rank() const { return rank_; }
  int descriptor() const { return descriptor_; }

  // Rank 0's: what kernels need of the step is there for the others when it returns. All of them
  // have met after the step before this one. followed_rows: StepBuffer's.
  void publish(const StepView& step, const int32_t* followed_rows = nullptr);
  // The others': waits for the next one; null when the group is closed or a rank is lost.
  const StepView* next_step();
  // Of that step; null if it follows none.
  const int32_t* followed_rows() const;

  // Rank 0's, any thread's: steps that are published from now on wait in the other ranks until each
  // has carried out one order more, whatever that is. And the others', any thread's: that it is.
  void add_order() { num_orders_.fetch_add(1); }
  void finish_order();

  // What a rank's products gave, [max_tokens, num_columns]; used in turns, so that a rank
  // that is ahead writes where nobody reads any more.
  float* partial(int32_t turn, int32_t rank) const;
  float* logits() const { return logits_; }  // [max_logit_rows, vocab_size]

  // Says that this rank is here and waits until all are, if it waits. At once when one is lost.
  void meet(bool waits);

  // Any thread's of any rank: all waits end, and all steps fail. The first reason counts.
  void lose(const std::string& why);
  bool is_lost() const;
  std::string reason() const;
  // Sleeps until it is closed or lost.
  void wait_until_over() const;
  // Rank 0's: the others' next_step() returns null.
  void close();

 private:
  struct Header;
  template <typename Condition>
  void wait_until(Condition&& condition, int64_t spin_ns);
  void wake();
  void wake_all();
  void lay_out(uint8_t* memory);

  const RankSizes sizes_;
  const int32_t rank_;
  int descriptor_ = -1;
  int64_t num_bytes_ = 0;
  Header* header_ = nullptr;
  StepView view_;  // of what was published
  int32_t* block_tables_ = nullptr;
  int32_t* followed_rows_ = nullptr;
  float* partials_ = nullptr;
  float* logits_ = nullptr;
  uint32_t num_meetings_ = 0;
  uint32_t num_steps_ = 0;
  std::atomic<uint32_t> num_orders_{0};  // given by rank 0, carried out by another
  int num_long_waits_ = 0;
};

}  // namespace lmi
