// The kernels compiled for the level "neon_bf16".
#define LMI_ISA neon_bf16
#define LMI_LEVEL kNeonBf16
#define LMI_SIMD 3
#define LMI_BYTE_DOT 1
#define LMI_BF16_DOT 1
#include "cpu/isa/table.inc"
