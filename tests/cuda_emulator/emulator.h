// Runs kernels on the host: one block after the other, every thread of it a fiber.
//
// What it checks beyond results: threads of a warp must meet in every warp-wide operation, those of
// a block in every barrier (else Error, which names who waits where); shared memory starts as NaN;
// asynchronous copies arrive when they are waited for and not before; threads run in ascending and
// descending order by turns, so that some of the missing barriers show; races.h finds the others.
// What it can't know: time, registers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "common/check.h"

namespace lmi::cuda::emulator {

struct Dim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

// Of the fiber that runs.
extern Dim3 thread_index;
extern Dim3 block_index;
extern Dim3 block_size;
extern Dim3 grid_size;

void run(Dim3 grid, unsigned num_threads, size_t shared_bytes, const std::function<void()>& body);

// Each thread of a kernel says when it enters it, has waited for the kernels before it, and leaves
// it. None may leave without; races.h finds global memory touched before.
void enter_kernel();
void wait_for_earlier_kernels();
void leave_kernel();
// Whether the thread that runs is in a kernel and has not waited yet.
bool is_early();

uint8_t* shared_memory();
void block_barrier();
void warp_barrier();

// What every lane of the warp gave, words [32][count]; all 32 must call, with the same count, and
// may read until their next call.
constexpr int kMaxWords = 16;
const uint32_t* exchange(const uint32_t* words, int count);

// Said before an atomic operation.
void note_atomic(const void* target, size_t num_bytes);

// Orders what blocks wrote and published before they arrived at a counter before what one does that
// sees them.
void publish_writes();
void arrive(const void* counter);
void see_arrivals(const void* counter);

// Queued, then done by the wait that completes its group. num_bytes past the copied are zeroed.
void copy_later(void* target, const void* source, int copied_bytes, int num_bytes);
void end_copy_group();
void wait_for_copies(int num_pending_groups);

}  // namespace lmi::cuda::emulator
