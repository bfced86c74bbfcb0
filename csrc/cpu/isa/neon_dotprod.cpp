// The kernels compiled for the level "neon_dotprod".
#define LMI_ISA neon_dotprod
#define LMI_LEVEL kNeonDotprod
#define LMI_SIMD 3
#define LMI_BYTE_DOT 1
#include "cpu/isa/table.inc"
