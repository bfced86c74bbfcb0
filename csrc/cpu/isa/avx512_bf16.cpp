// The kernels compiled for the level "avx512_bf16".
#define LMI_ISA avx512_bf16
#define LMI_SIMD 3
#include "cpu/isa/table.inc"
