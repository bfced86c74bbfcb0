// The kernels compiled for the level "avx512_bf16".
#define LMI_ISA avx512_bf16
#define LMI_LEVEL kAvx512Bf16
#define LMI_SIMD 2
#define LMI_BYTE_DOT 1
#define LMI_BF16_DOT 1
#include "cpu/isa/table.inc"
