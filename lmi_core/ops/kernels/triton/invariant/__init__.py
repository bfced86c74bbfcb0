"""Triton kernels whose result for a row doesn't depend on the rows beside it, to the bit.

Each has one tile shape for every number of rows, adds up in one order, and never splits by what
else is in the step. The other kernels of ``kernels.triton`` take rows one by one anyway.
"""

from lmi_core.ops.kernels.triton.invariant.attention import attention
from lmi_core.ops.kernels.triton.invariant.linear import (
    grouped_linear,
    head_linear,
    linear,
    linear_packed,
    linear_quantized,
)

__all__ = [
    "attention",
    "grouped_linear",
    "head_linear",
    "linear",
    "linear_packed",
    "linear_quantized",
]
