"""Stored tensors as numpy arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lmi_core.weights.formats import FloatArray
from lmi_core.weights.safetensors_file import TensorInfo

FLOAT_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
"""By safetensors' names; bf16 as the bits that it is."""
_INTEGERS = {"U8": np.uint8, "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64}
DTYPES = {
    **FLOAT_DTYPES,
    "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8,
    "F8_E8M0": np.uint8,
    **_INTEGERS,
}
"""Of everything that is read of checkpoints; fp8 as its bits."""


def read_array(tensor: TensorInfo) -> npt.NDArray[np.generic]:
    """A copy of a tensor's elements, read from its file."""
    raw = np.fromfile(tensor.path, np.uint8, tensor.num_bytes, offset=tensor.offset)
    return raw.view(DTYPES[tensor.dtype]).reshape(tensor.shape)


def to_float32(values: npt.NDArray[np.generic], dtype: str) -> FloatArray:
    """A copy; ``dtype``: safetensors' name of the stored type."""
    if dtype == "BF16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)
