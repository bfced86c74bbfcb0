// The worker of a device over a list that only counts: order, failures, followers, masks, the end.
#include "graph/device_worker.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"

// A step's row samples the number of the step, 100 times, and its own number.
struct LmiStepList {
  struct Slot {
    std::array<int32_t, 8> token_ids;
    std::array<float, 8> logprobs;
    std::array<int32_t, 8> num_top;
    int32_t num_rows;
  };

  std::array<Slot, LMI_STEP_SLOTS> slots;
  int32_t num_steps = 0;
  int32_t failing_run = -1;
  int32_t failing_wait = -1;
  std::vector<int32_t> followed_rows;  // of the last step that followed
  std::vector<uint32_t> mask_words;    // of all masks
  std::vector<int32_t> seen_ids;       // of the last step's first row
  std::atomic<int32_t> num_wanted{0};
  std::atomic<int32_t> num_captured{0};
};

namespace lmi {
namespace {

using List = LmiStepList;

int32_t run(List* list, const LmiStep* step, int32_t* slot_id) {
  const int32_t number = list->num_steps++;
  if (number == list->failing_run) return -1;
  if (step->followed_rows != nullptr) {
    list->followed_rows.assign(step->followed_rows, step->followed_rows + step->num_tokens);
  }
  const LmiStepEdits& edits = *step->sampling.edits(step->sampling.context);
  if (edits.num_masks > 0) {
    list->mask_words.push_back(edits.masks[step->sampling.rows[0].mask][0]);
  }
  list->seen_ids.assign(edits.seen.ids, edits.seen.ids + edits.seen.offsets[1]);
  *slot_id = number % LMI_STEP_SLOTS;
  List::Slot& slot = list->slots[static_cast<size_t>(*slot_id)];
  slot.num_rows = step->num_logit_rows;
  for (int32_t row = 0; row < slot.num_rows; ++row) {
    slot.token_ids[static_cast<size_t>(row)] = 100 * number + row;
    slot.logprobs[static_cast<size_t>(row)] = -0.5f;
    slot.num_top[static_cast<size_t>(row)] = 0;
  }
  return 0;
}

int32_t wait(List* list, int32_t slot_id, LmiStepResults* results) {
  List::Slot& slot = list->slots[static_cast<size_t>(slot_id)];
  if (slot.token_ids[0] / 100 == list->failing_wait) return -1;
  *results = {slot.token_ids.data(),
              slot.logprobs.data(),
              slot.num_top.data(),
              slot.num_top.data(),  // no targets
              nullptr,
              nullptr,
              slot.num_rows,
              0};
  return 0;
}

int32_t has_wanted(const List* list) { return list->num_wanted > 0; }

int32_t capture_wanted(List* list) {
  --list->num_wanted;
  ++list->num_captured;
  return 1;
}

void state(List* list, LmiStepListState* state) {
  *state = {list->num_captured, 0, list->failing_run == 0 ? "no room" : ""};
}

const char* error() { return "it broke"; }

constexpr StepFunctions kFunctions = {run, wait, has_wanted, capture_wanted, state, error};

constexpr StepCapacity kCapacity{.max_tokens = 8,
                                 .max_seqs = 2,
                                 .max_logit_rows = 8,
                                 .max_logprobs = 2,
                                 .max_copies = 1,
                                 .max_blocks_per_seq = 4,
                                 .block_size = 16};

// A worker, and three step buffers of two sequences that decode.
class Fixture {
 public:
  explicit Fixture(RankGroup* group = nullptr) : tables(2, 4), worker(kFunctions, &list, group) {
    sampling.vocab_size = 32;
    sampling.rows.resize(2);
    for (const int32_t row : {0, 1}) tables.append(row, std::array<int32_t, 1>{row});
    for (auto& step : steps) step = std::make_unique<StepBuffer>(kCapacity, tables, sampling);
  }

  StepBuffer& fill(size_t number) {
    StepBuffer& step = *steps[number % steps.size()];
    step.clear();
    const int32_t token_id = 1;
    for (int32_t row = 0; row < 2; ++row) step.add(&token_id, 1, 3, row, row, LogitRows::kLast);
    return step;
  }

  BlockTables tables;
  SamplingTable sampling;
  List list;
  std::array<std::unique_ptr<StepBuffer>, 3> steps;
  DeviceWorker worker;
};

TEST(device_worker_answers_steps_in_order) {
  Fixture fixture;
  const int completion_fd = eventfd(0, EFD_SEMAPHORE);
  int64_t last_finished_ns = 0;
  constexpr size_t kNumSteps = 200;
  for (size_t number = 0; number < kNumSteps + 2; ++number) {
    if (number >= 2) {  // two are in flight
      uint64_t one = 0;
      EXPECT_EQ(read(completion_fd, &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
      const StepBuffer& step = *fixture.steps[(number - 2) % 3];
      EXPECT_EQ(step.view().sampled_ids[1], static_cast<int32_t>(100 * (number - 2) + 1));
      EXPECT_EQ(step.view().sampled_logprobs[1], -0.5f);
      EXPECT(step.times.started_ns >= last_finished_ns);
      EXPECT(step.times.finished_ns >= step.times.started_ns);
      last_finished_ns = step.times.finished_ns;
    }
    if (number < kNumSteps) fixture.worker.submit(fixture.fill(number), completion_fd);
  }
  close(completion_fd);
}

TEST(device_worker_hands_on_what_a_step_follows) {
  Fixture fixture;
  StepBuffer& first = fixture.fill(0);
  StepBuffer& second = fixture.fill(1);
  second.follow(first, {1, 0});
  fixture.worker.submit(first, -1);
  fixture.worker.submit(second, -1);
  fixture.worker.drain();
  EXPECT(fixture.list.followed_rows == (std::vector<int32_t>{1, 0}));
  EXPECT_EQ(second.view().token_ids[0], 1);  // which the device replaces, not the host
}

TEST(device_worker_counts_what_a_step_follows) {
  Fixture fixture;
  fixture.sampling.vocab_size = 1000;
  fixture.sampling.rows[0].presence_penalty = 0.5f;
  fixture.worker.submit(fixture.fill(0), -1);
  for (const size_t number : {1, 2}) {  // while the one before is under way
    StepBuffer& step = fixture.fill(number);
    step.follow(*fixture.steps[number - 1], {1, 0});
    step.count_token(0);
    fixture.worker.submit(step, -1);
  }
  fixture.worker.drain();
  EXPECT(fixture.list.seen_ids == (std::vector<int32_t>{1, 101}));
  EXPECT_EQ(fixture.sampling.rows[0].num_output, 2);
}

TEST(device_worker_goes_on_after_failures) {
  Fixture fixture;
  fixture.list.failing_run = 0;
  fixture.list.failing_wait = 1;
  for (size_t number = 0; number < 3; ++number) fixture.worker.submit(fixture.fill(number), -1);
  fixture.worker.drain();
  EXPECT_EQ(fixture.steps[0]->error, "it broke");
  EXPECT_EQ(fixture.steps[0]->view().sampled_ids[0], -1);
  EXPECT_EQ(fixture.steps[1]->error, "it broke");
  EXPECT_EQ(fixture.steps[2]->error, "");
  EXPECT_EQ(fixture.steps[2]->view().sampled_ids[0], 200);
  EXPECT_EQ(fixture.worker.capture_error(), "no room");
}

TEST(device_worker_waits_for_masks) {
  Fixture fixture;
  StepBuffer& step = fixture.fill(0);
  const std::span<uint32_t> words = step.add_mask(0);
  fixture.worker.submit(step, -1);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  words[0] = 0x50;
  step.set_mask_ready(0);
  fixture.worker.drain();
  EXPECT(fixture.list.mask_words == (std::vector<uint32_t>{0x50}));
}

TEST(device_worker_captures_when_idle) {
  Fixture fixture;
  fixture.worker.submit(fixture.fill(0), -1);
  fixture.list.num_wanted = 2;
  fixture.worker.submit(fixture.fill(1), -1);
  fixture.worker.drain();
  while (fixture.list.num_captured < 2) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  fixture.worker.submit(fixture.fill(2), -1);
  fixture.worker.drain();
  EXPECT_EQ(fixture.steps[2]->view().sampled_ids[0], 200);
}

TEST(device_worker_launches_nothing_into_a_lost_group) {
  RankGroup group({.num_ranks = 2, .capacity = kCapacity}, 0, -1);
  Fixture fixture(&group);
  std::thread watcher([&group] { group.wait_until_over(); });
  group.lose("rank 1 is gone");
  watcher.join();
  fixture.list.num_wanted = 1;
  fixture.worker.submit(fixture.fill(0), -1);
  fixture.worker.drain();
  EXPECT_EQ(fixture.steps[0]->error, "rank 1 is gone");
  EXPECT(fixture.steps[0]->is_final);
  std::this_thread::sleep_for(std::chrono::milliseconds(80));  // it is idle
  fixture.worker.close();
  EXPECT_EQ(fixture.list.num_steps, 0);
  EXPECT_EQ(fixture.list.num_captured, 0);
}

TEST(device_worker_finishes_what_is_queued) {
  Fixture fixture;
  for (size_t number = 0; number < 3; ++number) fixture.worker.submit(fixture.fill(number), -1);
  fixture.worker.close();
  fixture.worker.close();
  EXPECT_EQ(fixture.steps[2]->view().sampled_ids[1], 201);
  EXPECT_ERROR(fixture.worker.submit(fixture.fill(0), -1), "the worker is closed");
}

TEST(device_worker_needs_all_functions) {
  EXPECT_ERROR(open_step_functions("/nowhere/liblmi_cuda.so"), "/nowhere/liblmi_cuda.so");
  EXPECT_ERROR(open_step_functions("libc.so.6"), "has no lmi_cuda_step_list_run");
}

}  // namespace
}  // namespace lmi
