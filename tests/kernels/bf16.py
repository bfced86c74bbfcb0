"""bf16 in numpy: arrays of uint16 that hold the upper halves of floats."""

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
HalfArray = npt.NDArray[np.uint16]


def to_bf16(x: npt.NDArray[np.floating]) -> HalfArray:
    """Round to nearest, ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(x: HalfArray) -> FloatArray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def as_float(x: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    """Any of the arrays that kernels take or give, in double precision."""
    return (from_bf16(x) if x.dtype == np.uint16 else x).astype(np.float64)
