#include "graph/device_rank_worker.h"

#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "common/check.h"
#include "common/signal_block.h"
#include "graph/device_worker.h"

namespace lmi {
namespace {

constexpr std::chrono::milliseconds kLook{100};  // for a group that another rank has ended

// Launches steps; a thread of its own waits for their ends, so that a failure is seen at once.
class DeviceRank {
 public:
  DeviceRank(RankGroup& group, const StepFunctions& functions, LmiStepList* list)
      : group_(group),
        functions_(functions),
        list_(list),
        rows_(static_cast<size_t>(group.sizes().capacity.max_logit_rows)) {
    const SignalBlock no_signals;
    waiter_ = std::thread([this] { wait_for_all(); });
  }
  ~DeviceRank() {
    {
      const std::lock_guard lock(mutex_);
      is_closing_ = true;
    }
    changed_.notify_all();
    waiter_.join();
  }
  DeviceRank(const DeviceRank&) = delete;
  DeviceRank& operator=(const DeviceRank&) = delete;

  // For a reason that only counts if it is the first; the launching thread may hang in the driver.
  [[noreturn]] void end(const std::string& why) {
    group_.lose("rank " + std::to_string(group_.rank()) + " failed: " + why);
    _exit(1);
  }

  void run(const StepView& step) {
    if (step.num_tokens == 0) {
      leave_at_most(0);
      LMI_CHECK(functions_.capture_wanted(list_) != 0, functions_.error());
    } else {
      LmiStep inputs = inputs_of(step, group_.followed_rows());
      inputs.sampling.rows = rows_.data();  // rank 0 samples
      leave_at_most(LMI_STEP_SLOTS - 1);
      int32_t slot = -1;
      LMI_CHECK(functions_.run(list_, &inputs, &slot) == 0, functions_.error());
      const std::lock_guard lock(mutex_);
      slots_.push_back(slot);
      changed_.notify_all();
    }
    group_.meet(false);
  }

 private:
  // Waits until no more steps are under way.
  void leave_at_most(size_t count) {
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, kLook, [&] { return slots_.size() <= count; })) {
      if (group_.is_lost()) throw LostRankError(group_.reason());
    }
  }

  void wait_for_all() {
    pthread_setname_np(pthread_self(), "lmi-rank-reader");
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return is_closing_ || !slots_.empty(); });
      if (slots_.empty()) return;
      const int32_t slot = slots_.front();
      lock.unlock();
      LmiStepResults results = {};
      if (functions_.wait(list_, slot, &results) != 0) {
        end(functions_.error());
      }
      lock.lock();
      slots_.pop_front();
      changed_.notify_all();
    }
  }

  RankGroup& group_;
  const StepFunctions functions_;
  LmiStepList* const list_;
  std::vector<LmiSampleRow> rows_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<int32_t> slots_;  // of steps under way
  bool is_closing_ = false;
  std::thread waiter_;
};

}  // namespace

void serve_device_rank(RankGroup& group, const std::string& library, LmiStepList* list) {
  const StepFunctions functions = open_step_functions(library);
  DeviceRank rank(group, functions, list);
  try {
    group.meet(false);  // as after each step: rank 0 may hand out the next one
    while (const StepView* step = group.next_step()) rank.run(*step);
    if (group.is_lost()) throw LostRankError(group.reason());
  } catch (const std::exception& error) {
    rank.end(error.what());
  }
}

}  // namespace lmi
