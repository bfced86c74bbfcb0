// The kernels compiled for the level "avx512_vnni".
#define LMI_ISA avx512_vnni
#define LMI_LEVEL kAvx512Vnni
#define LMI_SIMD 2
#define LMI_BYTE_DOT 1
#include "cpu/isa/table.inc"
