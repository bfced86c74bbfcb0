// Where the elements of mma.sync.m16n8k16 (16-bit operands) and .m16n8k32 (8-bit operands) lie in a
// warp's registers: PTX ISA, "Matrix Fragments for mma.m16n8k16" and "... m16n8k32". D = A B + C
// with A [16, 16 or 32], B [16 or 32, 8], C [16, 8], whose numbers of 32 bits lie alike in both.
#pragma once

#include "cuda/host_device.h"

namespace lmi::cuda {

struct Element {
  int row;
  int column;
};

// Lanes are 8 groups of 4: the group goes with rows of A and C and columns of B, a lane's place in
// its group with pairs of neighbours along the other direction.
LMI_HOST_DEVICE constexpr int fragment_group(int lane) { return lane / 4; }
LMI_HOST_DEVICE constexpr int fragment_pair(int lane) { return lane % 4 * 2; }

// Registers 0 .. 3 of A, each with a lower (0) and an upper half (1).
LMI_HOST_DEVICE constexpr Element fragment_a(int lane, int index, int half) {
  return {fragment_group(lane) + index % 2 * 8, fragment_pair(lane) + index / 2 * 8 + half};
}

// Registers 0 and 1 of B; rows run along K.
LMI_HOST_DEVICE constexpr Element fragment_b(int lane, int index, int half) {
  return {fragment_pair(lane) + index * 8 + half, fragment_group(lane)};
}

// The same for 8-bit operands: bytes 0 .. 3 of a register.
LMI_HOST_DEVICE constexpr Element byte_fragment_a(int lane, int index, int byte) {
  return {fragment_group(lane) + index % 2 * 8, lane % 4 * 4 + index / 2 * 16 + byte};
}
LMI_HOST_DEVICE constexpr Element byte_fragment_b(int lane, int index, int byte) {
  return {lane % 4 * 4 + index * 16 + byte, fragment_group(lane)};
}

// Numbers 0 .. 3 of C and D.
LMI_HOST_DEVICE constexpr Element fragment_c(int lane, int index) {
  return {fragment_group(lane) + index / 2 * 8, fragment_pair(lane) + index % 2};
}

}  // namespace lmi::cuda
