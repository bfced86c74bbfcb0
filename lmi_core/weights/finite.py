"""Weights that are no numbers: refused while they are read, by the name of their tensor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lmi_core import _native
from lmi_core.errors import ModelError
from lmi_core.weights.float_tensors import FLOAT_DTYPES, to_float32
from lmi_core.weights.safetensors_file import TensorInfo


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
