// The kernels compiled for the level "avx512".
#define LMI_ISA avx512
#define LMI_LEVEL kAvx512
#define LMI_SIMD 2
#include "cpu/isa/table.inc"
