// The kernels compiled for the level "avx2".
#define LMI_ISA avx2
#define LMI_LEVEL kAvx2
#define LMI_SIMD 1
#include "cpu/isa/table.inc"
