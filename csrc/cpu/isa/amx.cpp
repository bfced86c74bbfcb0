// The kernels compiled for the level "amx".
#define LMI_ISA amx
#define LMI_LEVEL kAmx
#define LMI_BASE avx512_bf16
#define LMI_SIMD 2
#define LMI_BYTE_DOT 1
#define LMI_BF16_DOT 1
#include "cpu/isa/table_amx.inc"
