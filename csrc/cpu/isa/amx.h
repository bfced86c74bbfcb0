// Intel's matrix tiles (AMX): the instructions that linear_amx.inc is written over. A thread has
// eight tiles, of up to 16 rows of 64 bytes each; a configuration says of how many, and nothing
// beyond them is loaded, multiplied or stored.
//
// Instructions instead of the compilers' functions for them: GCC makes a tile's number of an
// argument's text, which a template's parameter isn't, and GCC 12 doesn't say that memory is read,
// so that it drops what was written there before.
//
// The tests define LMI_AMX_STAND_IN and the same functions in plain C++.
#pragma once

#ifndef LMI_AMX_STAND_IN

#include <cstdint>

namespace lmi::cpu::tiles {

// config: as of TileConfig. Every tile is zero then.
static inline void configure(const void* config) {
  __asm__ volatile("ldtilecfg (%0)" : : "r"(config) : "memory");
}

// The thread has no tiles any more, whose 8 KiB its context switches would save.
static inline void release() { __asm__ volatile("tilerelease" : : : "memory"); }

template <int kTile>
static inline void set_zero() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

// Rows are stride bytes apart.
template <int kTile>
static inline void load(const void* source, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2"
                   :
                   : "r"(source), "r"(stride), "i"(kTile)
                   : "memory");
}

template <int kTile>
static inline void store(void* target, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)"
                   :
                   : "r"(target), "r"(stride), "i"(kTile)
                   : "memory");
}

// Row m of kSums += for each row k of kWeights, the pair k of row m of kRows times each pair of it.
// First products of 32 bits are summed over k, fused, those of pairs' first halves and of their
// second ones apart; then these two; then what was there before. Subnormal numbers are zeros.
template <int kSums, int kRows, int kWeights>
static inline void dot_bf16() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0"
                   :
                   : "i"(kSums), "i"(kRows), "i"(kWeights));
}

// The same of fours of bytes, signed ones of kRows and unsigned ones of kWeights, exactly.
template <int kSums, int kRows, int kWeights>
static inline void dot_bytes() {
  __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0"
                   :
                   : "i"(kSums), "i"(kRows), "i"(kWeights));
}

}  // namespace lmi::cpu::tiles

#endif
