"""Tensors as a checkpoint stores them, and safetensors files of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lmi_core.weights.formats import FloatArray

_MAX_SHARD_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Stored:
    """``dtype``: safetensors' name of what ``values`` hold."""

    dtype: str
    values: npt.NDArray[np.generic]

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes


def to_stored(values: FloatArray, dtype: str) -> Stored:
    """Floats of any shape in one of safetensors' types F32, F16 and BF16, to the nearest, ties to
    even."""
    if dtype == "BF16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(
            16
        )
        return Stored(dtype, rounded.astype(np.uint16))
    return Stored(dtype, values.astype(np.float16 if dtype == "F16" else np.float32))


def rounded_to(values: FloatArray, dtype: str) -> FloatArray:
    """What ``to_stored`` keeps of them."""
    stored = to_stored(values, dtype).values
    if dtype == "BF16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.astype(np.float32)


class Output(Protocol):
    """Where a model's tensors go."""

    def add(self, tensors: Mapping[str, Stored]) -> None: ...


class Shards:
    """Safetensors files in ``directory``, written one after the other; an index where there are
    several."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._waiting: dict[str, Stored] = {}
        self._files: list[tuple[Path, list[str]]] = []
        self.num_bytes = 0

    def add(self, tensors: Mapping[str, Stored]) -> None:
        self._waiting.update(tensors)
        if sum(tensor.num_bytes for tensor in self._waiting.values()) >= _MAX_SHARD_BYTES:
            self._write()

    def finish(self) -> None:
        """Write what is left, and give files the names that the format wants."""
        self._write()
        if len(self._files) == 1:
            self._files[0][0].rename(self._directory / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._files, 1):
            final = f"model-{number:05}-of-{len(self._files):05}.safetensors"
            path.rename(self._directory / final)
            weight_map |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
        path = self._directory / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2, sort_keys=True))

    def _write(self) -> None:
        if not self._waiting:
            return
        path = self._directory / f"part-{len(self._files)}.safetensors.partial"
        _write_file(path, self._waiting)
        self._files.append((path, [*self._waiting]))
        self.num_bytes += sum(tensor.num_bytes for tensor in self._waiting.values())
        self._waiting = {}


def _write_file(path: Path, tensors: Mapping[str, Stored]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        last = offset + tensor.num_bytes
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.values.shape),
            "data_offsets": [offset, last],
        }
        offset = last
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor.values).data)
