#include "cuda_emulator/emulator.h"

#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda_emulator/races.h"

#if !defined(__x86_64__)
#error "the emulator switches fibers on x86-64 only"
#endif

// Saves what a call must preserve on this stack, and goes on where the other one was left.
extern "C" void lmi_switch_fiber(void** left, void* entered);
asm(R"(
.text
.type lmi_switch_fiber, @function
lmi_switch_fiber:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size lmi_switch_fiber, .-lmi_switch_fiber
)");

namespace lmi::cuda::emulator {

Dim3 thread_index;
Dim3 block_index;
Dim3 block_size;
Dim3 grid_size;

namespace {

constexpr int kWarpSize = 32;
constexpr size_t kStackBytes = 48 << 10;
constexpr size_t kNumSavedRegisters = 6;
constexpr size_t kUntouchableBytes = 64 << 10;
constexpr uintptr_t kSharedAlignment = 128;

struct Copy {
  void* target;
  const void* source;
  int copied_bytes;
  int num_bytes;
};

struct Barrier {
  int num_members = 0;
  int num_arrived = 0;
  uint64_t generation = 0;
};

struct Warp {
  Barrier barrier;
  uint32_t words[2][kWarpSize * kMaxWords];
};

struct Fiber {
  uint8_t* stack = nullptr;
  void* stack_pointer = nullptr;
  bool is_done = false;
  bool is_early = false;
  const char* waits_for = nullptr;
  int phase = 0;  // of the warp's two word buffers
  std::vector<Copy> open_group;
  std::deque<std::vector<Copy>> groups;
};

struct Block {
  std::vector<uint8_t> stacks;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barrier;
  std::vector<uint8_t> reserved;  // shared memory, and before and behind it what nobody may touch
  uint8_t* shared = nullptr;
  size_t num_shared_bytes = 0;
  const std::function<void()>* body = nullptr;
  void* scheduler = nullptr;
  size_t current = 0;
  bool has_progressed = false;
  bool has_early_end = false;
};

Block block;
std::mutex running;  // one grid at a time

// While the emulator works for a thread, and not the thread itself.
struct OwnWork {
  OwnWork() { races::pause(); }
  ~OwnWork() { races::resume(block.current); }
};

Fiber& current() { return block.fibers[block.current]; }
Warp& current_warp() { return block.warps[block.current / kWarpSize]; }

void yield() { lmi_switch_fiber(&current().stack_pointer, block.scheduler); }

void release(Barrier& barrier) {
  barrier.num_arrived = 0;
  ++barrier.generation;
  block.has_progressed = true;
}

// Whether the caller came last.
bool wait(Barrier& barrier, const char* what) {
  const uint64_t generation = barrier.generation;
  if (++barrier.num_arrived == barrier.num_members) {
    release(barrier);
    return true;
  }
  current().waits_for = what;
  while (barrier.generation == generation) yield();
  current().waits_for = nullptr;
  return false;
}

[[noreturn]] void fiber_main() {
  races::resume(block.current);
  (*block.body)();
  races::pause();
  current().is_done = true;
  block.has_progressed = true;
  // As on the device, the barrier is for the threads that are left; a warp's operations are not.
  Barrier& barrier = block.barrier;
  if (--barrier.num_members > 0 && barrier.num_arrived == barrier.num_members) {
    release(barrier);
    races::pass_block_barrier();
  }
  yield();
  __builtin_unreachable();
}

void prepare(Fiber& fiber) {
  auto top = reinterpret_cast<uintptr_t>(fiber.stack + kStackBytes) & ~uintptr_t{15};
  // Entered by a return, so the address above counts as the caller's.
  auto* slots = reinterpret_cast<void**>(top) - 2;
  slots[0] = reinterpret_cast<void*>(&fiber_main);
  slots[1] = nullptr;
  fiber.stack_pointer = slots - kNumSavedRegisters;
  fiber.is_done = false;
  fiber.is_early = false;
  fiber.waits_for = nullptr;
  fiber.phase = 0;
  fiber.open_group.clear();
  fiber.groups.clear();
}

void run_block() {
  for (Fiber& fiber : block.fibers) prepare(fiber);
  block.barrier = {static_cast<int>(block.fibers.size()), 0, 0};
  for (Warp& warp : block.warps) warp.barrier = {kWarpSize, 0, 0};
  std::memset(block.shared, 0xff, block.num_shared_bytes);
  races::begin_block(block.reserved.data(), block.reserved.size(), block.shared,
                     block.num_shared_bytes);
  const size_t num_fibers = block.fibers.size();
  bool is_reversed = true;
  for (size_t num_left = num_fibers; num_left > 0;) {
    block.has_progressed = false;
    is_reversed = !is_reversed;
    for (size_t turn = 0; turn < num_fibers; ++turn) {
      block.current = is_reversed ? num_fibers - 1 - turn : turn;
      if (current().is_done) continue;
      thread_index.x = static_cast<unsigned>(block.current);
      lmi_switch_fiber(&block.scheduler, current().stack_pointer);
      races::pause();
      if (current().is_done) --num_left;
    }
    if (num_left == 0 || block.has_progressed) continue;
    for (block.current = 0; current().is_done;) ++block.current;
    LMI_CHECK(false, num_left, " threads of block ", block_index.x, ',', block_index.y, ',',
              block_index.z, " wait for ever; the first, thread ", block.current, ", in ",
              current().waits_for);
  }
}

void reserve(unsigned num_threads, size_t shared_bytes) {
  block.stacks.resize(num_threads * kStackBytes);
  block.fibers.resize(num_threads);
  for (size_t i = 0; i < num_threads; ++i) {
    block.fibers[i].stack = block.stacks.data() + i * kStackBytes;
  }
  block.warps.resize(num_threads / kWarpSize);
  block.reserved.resize(2 * kUntouchableBytes + kSharedAlignment + shared_bytes);
  const auto first = reinterpret_cast<uintptr_t>(block.reserved.data()) + kUntouchableBytes;
  block.shared =
      reinterpret_cast<uint8_t*>((first + kSharedAlignment - 1) & ~(kSharedAlignment - 1));
  block.num_shared_bytes = shared_bytes;
  races::begin_grid();
  races::ignore(block.stacks.data(), block.stacks.size());
  races::ignore(block.warps.data(), block.warps.size() * sizeof(Warp));
  for (const Dim3* place : {&thread_index, &block_index, &block_size, &grid_size}) {
    races::ignore(place, sizeof(*place));
  }
}

}  // namespace

void run(Dim3 grid, unsigned num_threads, size_t shared_bytes, const std::function<void()>& body) {
  LMI_CHECK(num_threads % kWarpSize == 0 && num_threads <= 1024, num_threads, " threads");
  const std::lock_guard lock(running);
  reserve(num_threads, shared_bytes);
  block.body = &body;
  block.has_early_end = false;
  block_size = {num_threads, 1, 1};
  grid_size = grid;
  for (block_index.z = 0; block_index.z < grid.z; ++block_index.z) {
    for (block_index.y = 0; block_index.y < grid.y; ++block_index.y) {
      for (block_index.x = 0; block_index.x < grid.x; ++block_index.x) run_block();
    }
  }
  const std::string races = races::end_grid();
  LMI_CHECK(!block.has_early_end, "a thread ended without waiting for earlier kernels");
  LMI_CHECK(races.empty(), races);
}

void enter_kernel() { current().is_early = true; }
void wait_for_earlier_kernels() { current().is_early = false; }
void leave_kernel() { block.has_early_end |= current().is_early; }
bool is_early() { return current().is_early; }

uint8_t* shared_memory() { return block.shared; }

void block_barrier() {
  const OwnWork own;
  if (wait(block.barrier, "a block's barrier")) races::pass_block_barrier();
}

void warp_barrier() {
  const OwnWork own;
  if (wait(current_warp().barrier, "a warp's barrier")) {
    races::pass_warp_barrier(block.current / kWarpSize);
  }
}

const uint32_t* exchange(const uint32_t* words, int count) {
  const OwnWork own;
  uint32_t* buffer = current_warp().words[current().phase];
  current().phase ^= 1;
  const size_t lane = block.current % kWarpSize;
  std::memcpy(buffer + lane * static_cast<size_t>(count), words,
              static_cast<size_t>(count) * sizeof(uint32_t));
  wait(current_warp().barrier, "a warp's operation");
  return buffer;
}

void note_atomic(const void* target, size_t num_bytes) {
  races::add_atomically(target, num_bytes, __builtin_return_address(0));
}

void publish_writes() { races::publish_writes(); }
void arrive(const void* counter) { races::arrive(counter); }
void see_arrivals(const void* counter) { races::see_arrivals(counter); }

void copy_later(void* target, const void* source, int copied_bytes, int num_bytes) {
  const OwnWork own;
  current().open_group.push_back({target, source, copied_bytes, num_bytes});
  races::begin_copy(target, static_cast<size_t>(num_bytes), source,
                    static_cast<size_t>(copied_bytes), __builtin_return_address(0));
}

void end_copy_group() {
  const OwnWork own;
  current().groups.push_back(std::exchange(current().open_group, {}));
}

void wait_for_copies(int num_pending_groups) {
  const OwnWork own;
  auto& groups = current().groups;
  while (groups.size() > static_cast<size_t>(num_pending_groups)) {
    for (const Copy& copy : groups.front()) {
      auto* target = static_cast<uint8_t*>(copy.target);
      const auto copied_bytes = static_cast<size_t>(copy.copied_bytes);
      const auto num_bytes = static_cast<size_t>(copy.num_bytes);
      std::memcpy(target, copy.source, copied_bytes);
      std::memset(target + copied_bytes, 0, num_bytes - copied_bytes);
      races::end_copy(target, num_bytes, __builtin_return_address(0));
    }
    groups.pop_front();
  }
}

}  // namespace lmi::cuda::emulator
