// The kernels compiled for the level "avx2_vnni".
#define LMI_ISA avx2_vnni
#define LMI_LEVEL kAvx2Vnni
#define LMI_SIMD 1
#define LMI_BYTE_DOT 1
#include "cpu/isa/table.inc"
