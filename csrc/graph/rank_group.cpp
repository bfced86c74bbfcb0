#include "graph/rank_group.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <utility>

#include "common/aligned_memory.h"
#include "common/spin.h"
#include "graph/step_thread.h"

namespace lmi {
namespace {

constexpr int64_t kMeetSpinNs = 50'000;
// Who is late for a sum comes soon: to be woken costs more than that, the most on virtual machines.
// Others get the core where they want it.
constexpr int64_t kMeetYieldNs = 2'000'000;
// A loop that generates for a few submits its next step within this time.
constexpr int64_t kStepSpinNs = 150'000;
constexpr size_t kMaxReason = 512;
// A process that is killed while it writes the reason keeps others from saying that it is lost so
// long at most.
constexpr int64_t kReasonNs = 50'000'000;

template <typename Condition>
bool yield_until(Condition&& condition, int64_t yield_ns) {
  const int64_t end_ns = monotonic_ns() + yield_ns;
  while (monotonic_ns() < end_ns) {
    if (condition()) return true;
    sched_yield();
  }
  return false;
}

}  // namespace

struct RankGroup::Header {
  enum State : uint32_t { kOpen, kClosed, kLost };
  enum Reason : uint32_t { kNone, kBeingWritten, kWritten };

  alignas(64) std::atomic<uint32_t> epoch;  // futex word
  std::atomic<uint32_t> num_sleeping;
  std::atomic<uint32_t> state;
  std::atomic<uint32_t> reason_state;
  char reason[kMaxReason];
  alignas(64) std::atomic<uint32_t> num_steps;
  uint32_t num_orders;
  int32_t num_tokens, num_seqs, num_logit_rows, num_copies, num_adapter_runs, num_followed_rows;
  struct alignas(64) Arrival {
    std::atomic<uint32_t> num_meetings;
  } arrivals[kMaxRanks];
};

static_assert(std::atomic<uint32_t>::is_always_lock_free);

RankGroup::RankGroup(const RankSizes& sizes, int32_t rank, int descriptor)
    : sizes_(sizes), rank_(rank) {
  LMI_CHECK(sizes.num_ranks >= 1 && sizes.num_ranks <= kMaxRanks, sizes.num_ranks, " ranks");
  LMI_CHECK(rank >= 0 && rank < sizes.num_ranks, "rank ", rank, " of ", sizes.num_ranks);
  LMI_CHECK((rank == 0) == (descriptor < 0), "rank 0 makes the memory");
  lay_out(nullptr);
  const bool is_new = descriptor < 0;
  descriptor_ =
      is_new ? memfd_create("lmi-ranks", MFD_CLOEXEC) : fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  LMI_CHECK(descriptor_ >= 0, "no memory for ranks: ", std::strerror(errno));
  struct stat status{};
  if (is_new) LMI_CHECK(ftruncate(descriptor_, num_bytes_) == 0, std::strerror(errno));
  LMI_CHECK(fstat(descriptor_, &status) == 0 && status.st_size == num_bytes_, "ranks' memory has ",
            status.st_size, " bytes, not ", num_bytes_);
  void* memory = mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  LMI_CHECK(memory != MAP_FAILED, num_bytes_, " bytes for ranks: ", std::strerror(errno));
  lay_out(static_cast<uint8_t*>(memory));
}

RankGroup::~RankGroup() {
  if (header_ != nullptr) munmap(header_, num_bytes_);
  if (descriptor_ >= 0) ::close(descriptor_);
}

// Every rank finds the same places from the sizes; a file of zeros is a group that is open.
void RankGroup::lay_out(uint8_t* memory) {
  int64_t offset = 0;
  const auto take = [&]<typename T>(T*& field, int64_t count) {
    field = memory == nullptr ? nullptr : reinterpret_cast<T*>(memory + offset);
    offset += round_up(count * static_cast<int64_t>(sizeof(T)), kAlignment);
  };
  const StepCapacity& capacity = sizes_.capacity;
  take(header_, 1);
  for (int32_t** array :
       {&view_.token_ids, &view_.positions, &view_.token_types, &view_.slots, &followed_rows_}) {
    take(*array, capacity.max_tokens);
  }
  for (int32_t** array :
       {&view_.first_rows, &view_.num_rows, &view_.kv_lengths, &view_.table_rows,
        &view_.adapter_first_rows, &view_.adapter_num_rows, &view_.adapter_slots}) {
    take(*array, capacity.max_seqs);
  }
  take(view_.logit_token_rows, capacity.max_logit_rows);
  take(view_.copy_src, capacity.max_copies);
  take(view_.copy_dst, capacity.max_copies);
  take(block_tables_, static_cast<int64_t>(capacity.max_seqs) * capacity.max_blocks_per_seq);
  take(partials_, 2 * sizes_.num_ranks * capacity.max_tokens * sizes_.num_columns);
  take(logits_, capacity.max_logit_rows * sizes_.vocab_size);
  num_bytes_ = offset;
  view_.capacity = capacity;
  view_.block_tables = block_tables_;
}

void RankGroup::publish(const StepView& step, const int32_t* followed_rows) {
  const auto copy = [](int32_t* target, const int32_t* source, int32_t count) {
    std::copy_n(source, count, target);
  };
  copy(view_.token_ids, step.token_ids, step.num_tokens);
  copy(view_.positions, step.positions, step.num_tokens);
  copy(view_.token_types, step.token_types, step.num_tokens);
  copy(view_.slots, step.slots, step.num_tokens);
  header_->num_followed_rows = followed_rows == nullptr ? 0 : step.num_tokens;
  copy(followed_rows_, followed_rows, header_->num_followed_rows);
  copy(view_.first_rows, step.first_rows, step.num_seqs);
  copy(view_.num_rows, step.num_rows, step.num_seqs);
  copy(view_.kv_lengths, step.kv_lengths, step.num_seqs);
  const StepCapacity& capacity = sizes_.capacity;
  for (int32_t seq = 0; seq < step.num_seqs; ++seq) {
    const int64_t source = static_cast<int64_t>(step.table_rows[seq]) *  //
                           step.capacity.max_blocks_per_seq;
    const int32_t num_blocks =
        (step.kv_lengths[seq] + capacity.block_size - 1) / capacity.block_size;
    view_.table_rows[seq] = seq;
    copy(block_tables_ + static_cast<int64_t>(seq) * capacity.max_blocks_per_seq,
         step.block_tables + source, num_blocks);
  }
  copy(view_.logit_token_rows, step.logit_token_rows, step.num_logit_rows);
  copy(view_.copy_src, step.copy_src, step.num_copies);
  copy(view_.copy_dst, step.copy_dst, step.num_copies);
  copy(view_.adapter_first_rows, step.adapter_first_rows, step.num_adapter_runs);
  copy(view_.adapter_num_rows, step.adapter_num_rows, step.num_adapter_runs);
  copy(view_.adapter_slots, step.adapter_slots, step.num_adapter_runs);
  header_->num_tokens = step.num_tokens;
  header_->num_seqs = step.num_seqs;
  header_->num_logit_rows = step.num_logit_rows;
  header_->num_copies = step.num_copies;
  header_->num_adapter_runs = step.num_adapter_runs;
  header_->num_orders = num_orders_.load();
  header_->num_steps.store(++num_steps_);
  wake();
}

const StepView* RankGroup::next_step() {
  ++num_steps_;
  const int64_t begin_ns = monotonic_ns();
  wait_until([this] { return header_->num_steps.load() == num_steps_; },
             num_long_waits_ < kMaxLongWaits ? kStepSpinNs : 0);
  const bool is_long = monotonic_ns() - begin_ns > kStepSpinNs;
  num_long_waits_ = is_long ? std::min(num_long_waits_ + 1, kMaxLongWaits) : 0;
  const auto has_carried_out = [this] {
    return static_cast<int32_t>(num_orders_.load() - header_->num_orders) >= 0;
  };
  wait_until(has_carried_out, kMeetSpinNs);
  if (header_->state.load() != Header::kOpen) return nullptr;
  view_.num_tokens = header_->num_tokens;
  view_.num_seqs = header_->num_seqs;
  view_.num_logit_rows = header_->num_logit_rows;
  view_.num_copies = header_->num_copies;
  view_.num_adapter_runs = header_->num_adapter_runs;
  return &view_;
}

const int32_t* RankGroup::followed_rows() const {
  return header_->num_followed_rows > 0 ? followed_rows_ : nullptr;
}

void RankGroup::finish_order() {
  num_orders_.fetch_add(1);
  wake();
}

float* RankGroup::partial(int32_t turn, int32_t rank) const {
  const int64_t size = sizes_.capacity.max_tokens * sizes_.num_columns;
  return partials_ + (turn % 2 * sizes_.num_ranks + rank) * size;
}

void RankGroup::meet(bool waits) {
  header_->arrivals[rank_].num_meetings.store(++num_meetings_);
  wake();
  if (!waits) return;
  const auto is_over = [this] {
    if (header_->state.load() != Header::kOpen) return true;
    for (int32_t rank = 0; rank < sizes_.num_ranks; ++rank) {
      const uint32_t others = header_->arrivals[rank].num_meetings.load();
      if (static_cast<int32_t>(others - num_meetings_) < 0) return false;
    }
    return true;
  };
  if (spin_until(is_over, std::chrono::nanoseconds(kMeetSpinNs))) return;
  if (yield_until(is_over, kMeetYieldNs)) return;
  wait_until(is_over, 0);
}

template <typename Condition>
void RankGroup::wait_until(Condition&& condition, int64_t spin_ns) {
  const auto is_over = [&] { return condition() || header_->state.load() != Header::kOpen; };
  if (spin_until(is_over, std::chrono::nanoseconds(spin_ns))) return;
  // Sleepers count themselves before they look for the last time, and whoever changes something
  // looks for them afterwards (both sequentially consistent).
  header_->num_sleeping.fetch_add(1);
  while (true) {
    const uint32_t epoch = header_->epoch.load();
    if (is_over()) break;
    syscall(SYS_futex, &header_->epoch, FUTEX_WAIT, epoch, nullptr, nullptr, 0);
  }
  header_->num_sleeping.fetch_sub(1);
}

void RankGroup::wake_all() {
  wake();
  syscall(SYS_futex, &header_->state, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void RankGroup::wake() {
  if (header_->num_sleeping.load() == 0) return;
  header_->epoch.fetch_add(1);
  syscall(SYS_futex, &header_->epoch, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// The state itself is a futex word for those who wait for nothing else, whom no step wakes.
void RankGroup::wait_until_over() const {
  while (header_->state.load() == Header::kOpen) {
    syscall(SYS_futex, &header_->state, FUTEX_WAIT, Header::kOpen, nullptr, nullptr, 0);
  }
}

void RankGroup::lose(const std::string& why) {
  uint32_t is_there = Header::kNone;
  if (header_->reason_state.compare_exchange_strong(is_there, Header::kBeingWritten)) {
    std::memcpy(header_->reason, why.data(), std::min(why.size(), kMaxReason - 1));
    header_->reason_state.store(Header::kWritten);
  }
  const int64_t end_ns = monotonic_ns() + kReasonNs;
  while (header_->reason_state.load() != Header::kWritten && monotonic_ns() < end_ns) cpu_pause();
  // Those who see that it is lost ask for the reason at once.
  uint32_t state = Header::kOpen;
  if (header_->state.compare_exchange_strong(state, Header::kLost)) wake_all();
}

bool RankGroup::is_lost() const { return header_->state.load() == Header::kLost; }

std::string RankGroup::reason() const {
  return header_->reason_state.load() == Header::kWritten ? header_->reason : "a rank is lost";
}

void RankGroup::close() {
  uint32_t state = Header::kOpen;
  header_->state.compare_exchange_strong(state, Header::kClosed);
  wake_all();
}

}  // namespace lmi
