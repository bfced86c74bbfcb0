// The kernels compiled for the level "neon".
#define LMI_ISA neon
#define LMI_LEVEL kNeon
#define LMI_SIMD 3
#include "cpu/isa/table.inc"
