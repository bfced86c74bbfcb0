// What a step list is behind its C interface: step_list.cu records it, step_launcher.cu launches
// it.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "cuda/captured_steps.h"
#include "cuda/step_memory.h"
#include "cuda/step_nodes.h"
#include "cuda/step_packer.h"
#include "cuda/step_sampler.h"

namespace lmi::cuda {

// What the host needs of a step until somebody has waited for it.
struct Slot {
  std::atomic<bool> is_busy{false};
  PinnedMemory inputs;
  PinnedMemory results;
  GrowingUpload edits;
  void* done = nullptr;
  int32_t num_rows = 0;
  int32_t max_top = 0;
};

class StepLauncher {
 public:
  explicit StepLauncher(const LmiStepSizes& sizes) : packer_(sizes), captured_(sizes) {}
  StepLauncher(const StepLauncher&) = delete;
  StepLauncher& operator=(const StepLauncher&) = delete;
  ~StepLauncher();

  int32_t add(int32_t node, int32_t rows, const void* args);
  int32_t set_adapter(int32_t slot, uint64_t parts) { return packer_.set_adapter(slot, parts); }
  int64_t num_bytes() const;
  int32_t start(void* memory);
  int32_t run(const LmiStep& step, int32_t* slot_id);
  int32_t wait(int32_t slot_id, LmiStepResults* results);
  bool has_wanted() const { return captured_.has_wanted() && !slots_[next_slot_].is_busy; }
  bool capture_wanted();
  int32_t capture(StepShape shape);
  int32_t capture(int32_t row_count_id, int32_t key_count_id);
  int32_t warm_up();
  LmiStepListState state() const {
    return {captured_.num_captured(), num_replayed_, captured_.error()};
  }

 private:
  int32_t add_attention(const LmiAttention& args);
  template <typename Args>
  int32_t prepare(const Args& args, int32_t rows, int32_t (*prepare_rows)(const Args&, int32_t));
  int32_t upload(const LmiStep& step, const SizedStep& sized, Slot& slot);
  int32_t forward(const StepCounts& counts);
  int32_t run_empty(StepShape shape);
  int32_t settle(int32_t status);
  int32_t record(StepShape shape, void** graph);
  int32_t launch(const LmiStep& step, Slot& slot);
  StepContext context_of(const StepCounts& counts, const StepInputs& inputs) const {
    return {counts,
            inputs,
            packer_.sizes().block_size,
            packer_.sizes().experts_per_token,
            partials_,
            log_masses_,
            arrivals_};
  }
  int32_t sample(const LmiStep& step, const StepInputs& inputs, Slot& slot);
  int32_t finish(const LmiStep& step, const StepInputs& inputs, Slot& slot);

  StepPacker packer_;
  CapturedSteps captured_;
  std::vector<Launch> copies_;
  std::vector<Launch> nodes_;
  StepSampler sampler_;
  void* ranks_ = nullptr;  // who share what is sampled; null: there is one

  void* stream_ = nullptr;
  std::array<Slot, LMI_STEP_SLOTS> slots_;
  size_t next_slot_ = 0;
  int64_t input_bytes_ = 0;
  uint8_t* inputs_ = nullptr;  // on the device, as the following
  uint8_t* results_ = nullptr;
  float* partials_ = nullptr;
  float* log_masses_ = nullptr;
  int32_t* arrivals_ = nullptr;
  bool has_results_ = false;  // whether the last step's are there
  std::atomic<int64_t> num_replayed_{0};
};

}  // namespace lmi::cuda

struct LmiStepList : lmi::cuda::StepLauncher {
  using StepLauncher::StepLauncher;
};
