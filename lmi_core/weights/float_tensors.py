"""Stored tensors of floating-point types as numpy arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lmi_core.weights.formats import FloatArray

FLOAT_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
"""By safetensors' names; bf16 as the bits that it is."""


def to_float32(values: npt.NDArray[np.generic], dtype: str) -> FloatArray:
    """A copy; ``dtype``: safetensors' name of the stored type."""
    if dtype == "BF16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)
