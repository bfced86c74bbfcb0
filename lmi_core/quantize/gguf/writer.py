"""Writing of GGUF files: the header first, then tensors in any order, each in its place.

Format: as ``lmi_core/weights/gguf/file.py`` reads it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lmi_core.weights.gguf.file import MAGIC
from lmi_core.weights.gguf.types import TYPES

_VERSION = 3
_ALIGNMENT = 32
_TYPE_IDS = {kind.name: type_id for type_id, kind in TYPES.items()}
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_OF_ARRAYS = {"uint32": _UINT32, "int32": _INT32, "float32": _FLOAT32}


class GgufWriter:
    """A file at ``path`` with ``metadata`` (bool, int, float, str, lists of str, arrays) and
    ``tensors``: of each its type and shape, as matrices are read."""

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, Any],
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    ) -> None:
        parts = [MAGIC, struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
        parts += [part for key, value in metadata.items() for part in (_text(key), _value(value))]
        self._places: dict[str, tuple[int, int]] = {}
        at = 0
        for name, (kind, shape) in tensors.items():
            size = num_tensor_bytes(kind, shape)
            self._places[name] = at, size
            dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
            parts += [_text(name), dimensions, struct.pack("<IQ", _TYPE_IDS[kind], at)]
            at += -(-size // _ALIGNMENT) * _ALIGNMENT
        header = b"".join(parts)
        self._start = -(-len(header) // _ALIGNMENT) * _ALIGNMENT
        self._missing = set(tensors)
        self.num_bytes = sum(size for _, size in self._places.values())
        self._file = path.open("wb")
        self._file.write(header)
        self._file.truncate(self._start + at)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def write(self, name: str, values: npt.NDArray[np.generic]) -> None:
        """Put a tensor's numbers or blocks into its place."""
        at, size = self._places[name]
        if values.nbytes != size:
            raise ValueError(f"{name} has {values.nbytes} bytes, not {size}")
        self._missing.remove(name)
        self._file.seek(self._start + at)
        self._file.write(np.ascontiguousarray(values).data)

    def finish(self) -> None:
        """Raise ValueError unless all tensors are there."""
        if self._missing:
            raise ValueError(f"{', '.join(sorted(self._missing)[:4])} weren't written")
        self._file.flush()


def num_tensor_bytes(kind: str, shape: tuple[int, ...]) -> int:
    block = TYPES[_TYPE_IDS[kind]]
    return math.prod(shape) // block.num_weights * block.num_bytes


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, np.ndarray):
        head = struct.pack("<IIQ", _ARRAY, _OF_ARRAYS[value.dtype.name], len(value))
        return head + value.tobytes()
    return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_text, value))
