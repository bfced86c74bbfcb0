"""Reading of safetensors files: the header, with every rule of the format checked.

Format: 8 bytes little-endian header size, a JSON object (name -> dtype, shape, data_offsets;
``__metadata__`` -> strings), then the tensors' bytes, row-major, without holes or overlaps.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmi_core.errors import ModelError
from lmi_core.files import open_regular

MAX_HEADER_BYTES = 100_000_000
_LFS_POINTER = b"version "
"""How the text begins that a clone without Git LFS has in a large file's place."""
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Turned:
    """How a matrix lies in a file that is the transposed of what is there, or rows of it."""

    shape: tuple[int, ...]
    """Of what is there."""
    first: int = 0
    step: int = 1


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: ``offset`` and ``num_bytes`` in bytes, from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    num_bytes: int
    turned: Turned | None = None
    """None: the elements lie one after the other."""


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a file by name, checked; raises ModelError naming the file and the fault."""
    try:
        with open_regular(path) as file:
            file_bytes = os.fstat(file.fileno()).st_size
            header, data_start = _read_header_bytes(path, file.read(8), file.read, file_bytes)
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}", field=path.name) from error
    entries = _parse_json(path, header)
    _check_metadata(path, entries.pop("__metadata__", {}))
    tensors = {
        name: _tensor(path, name, entry, data_start, file_bytes - data_start)
        for name, entry in entries.items()
    }
    _check_coverage(path, tensors, data_start, file_bytes)
    return tensors


def check_is_no_pointer(path: Path, prefix: bytes) -> None:
    """Raise ModelError if a file that begins with these 8 bytes stands for another one."""
    if prefix == _LFS_POINTER:
        raise ModelError(
            f"{path} is a Git LFS pointer, not the file: fetch what it stands for (git lfs pull)",
            field=path.name,
        )


def fault(path: Path, problem: str) -> ModelError:
    return ModelError(
        f"{path}: {problem}; the file is damaged or not safetensors, fetch it again",
        field=path.name,
    )


def _read_header_bytes(path: Path, prefix: bytes, read: Any, file_bytes: int) -> tuple[bytes, int]:
    if len(prefix) < 8:
        raise fault(path, f"holds {file_bytes} bytes, too few for a header")
    check_is_no_pointer(path, prefix)
    header_bytes = int.from_bytes(prefix, "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise fault(path, f"header of {header_bytes} bytes is over {MAX_HEADER_BYTES}")
    if 8 + header_bytes > file_bytes:
        raise fault(path, f"header of {header_bytes} bytes ends beyond the file's {file_bytes}")
    return read(header_bytes), 8 + header_bytes


def _parse_json(path: Path, header: bytes) -> dict[str, Any]:
    if header[:1] != b"{":
        raise fault(path, f"header must start with '{{', found {header[:1]!r}")
    try:
        entries = json.loads(header.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise fault(path, f"header is not valid JSON ({error})") from error
    assert isinstance(entries, dict)
    return entries


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"duplicate key {twice!r}")
    return entries


def _check_metadata(path: Path, metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise fault(path, "__metadata__ must map strings to strings")


def _tensor(path: Path, name: str, entry: Any, data_start: int, data_bytes: int) -> TensorInfo:
    what = f"tensor {name!r}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise fault(path, f"{what} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise fault(path, f"{what} has unknown dtype {dtype!r}")
    if not _are_counts(shape):
        raise fault(path, f"{what} has shape {_short(shape)}, must be a list of integers >= 0")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise fault(path, f"{what} has data_offsets {_short(offsets)}, must be [begin, end]")
    begin, end = offsets
    if not begin <= end <= data_bytes:
        raise fault(path, f"{what} has data_offsets [{begin}, {end}] outside 0 to {data_bytes}")
    num_bits = math.prod(shape) * DTYPE_BITS[dtype]
    if num_bits != (end - begin) * 8:
        raise fault(
            path, f"{what} ({dtype} {_short(shape)}) has {end - begin} bytes, not {num_bits / 8:g}"
        )
    return TensorInfo(name, dtype, tuple(shape), path, data_start + begin, end - begin)


def _are_counts(values: object) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= 64
        and all(type(value) is int and 0 <= value < 2**63 for value in values)
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_coverage(
    path: Path, tensors: Mapping[str, TensorInfo], data_start: int, file_bytes: int
) -> None:
    position = data_start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.num_bytes)):
        if tensor.offset < position:
            raise fault(path, f"tensor {tensor.name!r} overlaps the one before it")
        if tensor.offset > position:
            raise fault(path, f"{tensor.offset - position} bytes before {tensor.name!r} are unused")
        position += tensor.num_bytes
    if position != file_bytes:
        raise fault(path, f"{file_bytes - position} bytes at the end are unused")
