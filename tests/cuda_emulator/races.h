// Finds races in the kernels that the emulator runs, as the compute sanitizer's racecheck does, and
// over global memory too: two threads touch a byte, one of them writes, and no barrier lies
// between.
//
// Kernels compiled with -fsanitize=thread call a function before every access; races.cpp is what
// they call, in place of the sanitizer's library, whose threads would be too dear for a grid's. It
// knows how threads of a grid are ordered: those of a block by its barriers, those of a warp by the
// warp's, those of two blocks by counters that both come to and not else, those of two kernels once
// the later one has waited.
// Shuffles and products order nothing, as PTX says. An asynchronous copy may write from its start
// until its wait.
// GCC tells of what an assignment loads and stores, not of a structure that a call takes, or that
// is stored as its result: *y = from_float<bf16>(x). So in kernels none but device functions, which
// the emulator always inlines, take or return structures.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace lmi::cuda::emulator::races {

// Memory of fibers and the emulator's own, which no thread shares.
void ignore(const void* first, size_t num_bytes);

void begin_grid();
// Its dynamic shared memory, in the middle of `num_reserved` bytes that no thread may touch.
void begin_block(const uint8_t* reserved, size_t num_reserved, const uint8_t* shared,
                 size_t num_bytes);
// From here until pause() accesses are those of that thread of the block.
void resume(size_t thread);
void pause();
void pass_block_barrier();
void pass_warp_barrier(size_t warp);

// The thread that runs adds to it; two that do don't race.
void add_atomically(const void* target, size_t num_bytes, const void* site);

// A thread's block comes to a counter with what its threads did before the last barrier but not
// after one of them last published; and what blocks so brought there is ordered before what this
// one does from now on.
void publish_writes();
void arrive(const void* counter);
void see_arrivals(const void* counter);

// The thread that runs starts and completes a copy to there; the site is the caller's.
void begin_copy(const void* target, size_t num_bytes, const void* source, size_t num_source_bytes,
                const void* site);
void end_copy(const void* target, size_t num_bytes, const void* site);

// What was found in the grid, for a reader; empty if nothing.
std::string end_grid();

}  // namespace lmi::cuda::emulator::races
