"""Stored tensors as numpy arrays; those whose weights are no numbers are refused by name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lmi_core import _native
from lmi_core.errors import ModelError
from lmi_core.weights.formats import FloatArray
from lmi_core.weights.safetensors_file import TensorInfo

FLOAT_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
"""By safetensors' names; bf16 as the bits that it is."""
_PIECE_BYTES = 1 << 24
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
    """A copy of a tensor's elements, in its shape, read from its file."""
    raw = np.fromfile(tensor.path, np.uint8, tensor.num_bytes, offset=tensor.offset)
    return elements(tensor, raw.view(DTYPES[tensor.dtype]))


def holds_same(one: TensorInfo, other: TensorInfo) -> bool:
    """Whether two tensors are equal to the bit, read a piece at a time; those of other types or
    sizes aren't."""
    if (one.dtype, one.shape, one.turned) != (other.dtype, other.shape, other.turned):
        return False
    if (one.path, one.offset) == (other.path, other.offset):
        return True
    for first in range(0, one.num_bytes, _PIECE_BYTES):
        count = min(_PIECE_BYTES, one.num_bytes - first)
        a, b = (np.fromfile(t.path, np.uint8, count, offset=t.offset + first) for t in (one, other))
        if not np.array_equal(a, b):
            return False
    return True


def elements(tensor: TensorInfo, values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """A tensor's, in its shape, of the ``values`` that lie in its place; a view where they lie one
    after the other."""
    if tensor.turned is None:
        return values.reshape(tensor.shape)
    turned = values.reshape(tensor.turned.shape).T
    return np.ascontiguousarray(turned[tensor.turned.first :: tensor.turned.step])


def to_float32(values: npt.NDArray[np.generic], dtype: str) -> FloatArray:
    """A copy in the same shape; ``dtype``: safetensors' name of the stored type."""
    if dtype == "BF16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


class NotFiniteError(ModelError):
    """What was to be packed holds a NaN or an infinity."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"{' or '.join(names) or 'a matrix'} holds a number that isn't finite; it is damaged",
            field="model",
        )


def check_finite(tensor: TensorInfo, values: npt.NDArray[np.generic]) -> None:
    """Raise ModelError for a tensor of floats that holds a NaN or an infinity, with its place.

    ``values``: its elements as stored, contiguous, bf16 as uint16.
    """
    if tensor.dtype not in FLOAT_DTYPES or _native.is_finite(values):
        return
    values = np.atleast_1d(values)
    for row, numbers in enumerate(values.reshape(len(values), -1)):
        floats = to_float32(numbers, tensor.dtype)
        column = int(np.isfinite(floats).argmin())
        if not np.isfinite(floats[column]):
            place = [row, *map(int, np.unravel_index(column, values.shape[1:]))]
            raise ModelError(
                f"{tensor.path}: {tensor.name} holds {floats[column]} at {place}; it is damaged",
                field="model",
            )
