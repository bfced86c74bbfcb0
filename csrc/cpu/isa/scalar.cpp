// The kernels compiled for the level "scalar".
#define LMI_ISA scalar
#define LMI_LEVEL kScalar
#define LMI_SIMD 0
#include "cpu/isa/table.inc"
