// Kernels with known races, and without, for the tests of what finds them (races.h) and counts
// their accesses (traffic.h).
#include <cstdint>

#include "cuda/launch.cuh"

namespace lmi::cuda {
namespace {

constexpr int kThreads = 64;

struct Args {
  int32_t* global;  // [2 kThreads], [kThreads][kWarpSize] of columns
};

int32_t* shared() { return reinterpret_cast<int32_t*>(shared_memory()); }
int own() { return static_cast<int>(threadIdx.x); }

// Of the other warp.
int other() { return (own() + kWarpSize) % kThreads; }

void block_ordered(Args args) {
  shared()[own()] = own();
  block_barrier();
  args.global[own()] = shared()[other()];
}

void block_unordered(Args args) {
  shared()[own()] = own();
  warp_barrier();
  args.global[own()] = shared()[other()];
}

void warp_ordered(Args args) {
  shared()[own()] = own();
  warp_barrier();
  args.global[own()] = shared()[own() ^ 1];
}

void warp_unordered(Args args) {
  shared()[own()] = own();
  args.global[own()] = shared()[own() ^ 1] + shuffle(own(), 0);
}

// Written again while a neighbour may still be reading.
void overwritten(Args args) {
  shared()[own()] = own();
  block_barrier();
  args.global[own()] = shared()[other()];
  shared()[own()] = 0;
}

// Words that a lane gets are others' rows.
void matrices(Args args) {
  shared()[own()] = own();
  warp_barrier();
  uint32_t words[4];
  load_matrices(words, shared() + warp_id() * kWarpSize + lane_id() % 8 * 4);
  shared()[own()] = 0;
  args.global[own()] = static_cast<int32_t>(words[0]);
}

void in_variables(Args args) {
  __shared__ int32_t values[kThreads];
  values[own()] = own();
  warp_barrier();
  args.global[own()] = values[other()];
}

struct NumberPair {
  bf16 low, high;
};

__device__ NumberPair pair_of(int low, int high) {
  return {from_float<bf16>(static_cast<float>(low)), from_float<bf16>(static_cast<float>(high))};
}

// What the device layer and a device function return: too large to be inlined for their size.
void numbers(Args args) {
  auto* const number = reinterpret_cast<bf16*>(shared() + own());
  *number = from_float<bf16>(static_cast<float>(own()));
  warp_barrier();
  args.global[own()] = shared()[other()];
}

void structures(Args args) {
  NumberPair* const pair = reinterpret_cast<NumberPair*>(shared()) + own();
  if (own() < kWarpSize) {
    *pair = pair_of(own(), 1);
  } else {
    *pair = pair_of(0, own());
  }
  warp_barrier();
  args.global[own()] = shared()[other()];
}

void copied(Args args) {
  copy_async<4>(shared() + own(), args.global + own(), true);
  end_copy_group();
  wait_for_copies<0>();
  block_barrier();
  args.global[kThreads + own()] = shared()[other()];
}

// Its source lies where nobody may read.
void copied_of_nothing(Args args) {
  copy_async<4>(shared() + own(), shared() + kThreads + own(), false);
  end_copy_group();
  wait_for_copies<0>();
  block_barrier();
  args.global[own()] = shared()[other()];
}

// Each waits for its own copy only.
void copied_unordered(Args args) {
  copy_async<4>(shared() + own(), args.global + own(), true);
  end_copy_group();
  wait_for_copies<0>();
  args.global[kThreads + own()] = shared()[other()];
}

void copied_too_late(Args args) {
  copy_async<4>(shared() + own(), args.global + own(), true);
  end_copy_group();
  block_barrier();
  args.global[kThreads + own()] = shared()[own()];
  wait_for_copies<0>();
}

void beyond_the_end(Args) { shared()[kThreads + own()] = 0; }

void blocks_of_their_own(Args args) { args.global[blockIdx.x * kThreads + threadIdx.x] = own(); }

void blocks_together(Args args) { args.global[own()] = own(); }

void blocks_read_and_write(Args args) {
  if (blockIdx.x == 0) shared()[own()] = args.global[own()];
  if (blockIdx.x == 1) args.global[own()] = own();
}

// The last block to come reads what all wrote, and have published, having seen them; or not.
template <bool kPublish, bool kSees>
void last_block_reads(Args args) {
  int32_t* const counter = args.global + 2 * kThreads - 1;
  if (own() < kWarpSize) args.global[static_cast<int>(blockIdx.x) * kWarpSize + own()] = 1;
  if (kPublish) publish_writes();
  block_barrier();
  if (threadIdx.x == 0) shared()[0] = arrive(counter);
  block_barrier();
  if (shared()[0] + 1 < static_cast<int32_t>(gridDim.x)) return;
  block_barrier();
  if (kSees) see_writes(counter);
  shared()[own()] = args.global[own()];
}
void last_block_sees(Args args) { last_block_reads<true, true>(args); }
void last_block_guesses(Args args) { last_block_reads<true, false>(args); }
void last_block_of_silent(Args args) { last_block_reads<false, true>(args); }

// Each thread a row of 32 words of shared memory, then of global memory a sector of its own.
void columns(Args args) {
  __shared__ int32_t values[kThreads * kWarpSize];
  values[own() * kWarpSize] = own();
  block_barrier();
  args.global[own() * kWarpSize] = values[own()];
}

void sums(Args args) { atomic_add(args.global, 1); }

void never_waiting(Args) { shared()[own()] = own(); }

void waiting_too_late(Args args) {
  args.global[own()] = own();
  wait_for_earlier_kernels();
}

template <void (*kKernel)(Args)>
void waiting(Args args) {
  wait_for_earlier_kernels();
  kKernel(args);
}

}  // namespace
}  // namespace lmi::cuda

using namespace lmi::cuda;

// 0, or -1 and lmi_cuda_error says what was found.
#define LMI_RACE_OF(name, kernel, num_blocks)                                                  \
  extern "C" __attribute__((visibility("default"))) int32_t lmi_race_##name(int32_t* global) { \
    return launch(#name, kernel, {num_blocks, 1, 1}, kThreads, kThreads * sizeof(int32_t),     \
                  nullptr, Args{global});                                                      \
  }
#define LMI_RACE(kernel, num_blocks) LMI_RACE_OF(kernel, waiting<kernel>, num_blocks)

LMI_RACE(block_ordered, 1)
LMI_RACE(last_block_sees, 2)
LMI_RACE(last_block_guesses, 2)
LMI_RACE(last_block_of_silent, 2)
LMI_RACE(block_unordered, 1)
LMI_RACE(warp_ordered, 1)
LMI_RACE(warp_unordered, 1)
LMI_RACE(overwritten, 1)
LMI_RACE(matrices, 1)
LMI_RACE(in_variables, 1)
LMI_RACE(numbers, 1)
LMI_RACE(structures, 1)
LMI_RACE(copied, 1)
LMI_RACE(copied_of_nothing, 1)
LMI_RACE(copied_unordered, 1)
LMI_RACE(copied_too_late, 1)
LMI_RACE(beyond_the_end, 1)
LMI_RACE(blocks_of_their_own, 2)
LMI_RACE(blocks_together, 2)
LMI_RACE(blocks_read_and_write, 2)
LMI_RACE(sums, 2)
LMI_RACE(columns, 1)
LMI_RACE_OF(never_waiting, never_waiting, 1)
LMI_RACE_OF(waiting_too_late, waiting_too_late, 1)
