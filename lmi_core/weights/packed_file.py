"""A file of packed matrices.

Format: 8 bytes little-endian size of the header, the header (JSON: label -> offset, num_bytes and
checksum of a matrix), zeros up to a multiple of 4096 bytes, then the matrices, each on such a
multiple.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from lmi_core import _native
from lmi_core.weights.formats import PackFormat, RowRounding

_PAGE_BYTES = 4096
_WRITE_BYTES = 2 << 20
"""Huge pages, so that the system keeps the file in memory in such pages."""
Bytes = npt.NDArray[np.uint8]
_MAX_HEADER_BYTES = 16 << 20


class MatrixLayout(TypedDict):
    """What a matrix is packed as: [num_outputs, num_inputs], of each of so many experts."""

    num_outputs: int
    num_inputs: int
    format: PackFormat
    rounding: RowRounding
    gated: bool
    group_size: int
    num_experts: int


@dataclass(frozen=True, slots=True)
class PackedFile:
    """The table of a file: where each matrix lies."""

    file: _native.MappedFile
    slices: dict[str, tuple[int, int, int]]
    """Label -> offset, bytes, checksum."""

    @classmethod
    def open(cls, path: Path) -> PackedFile:
        """Raises OSError, and ValueError for a file that was cut off or isn't one of ours."""
        path.stat()
        file = _native.MappedFile(str(path), huge_pages=True)
        size = int.from_bytes(file.array(0, min(8, file.size)).tobytes(), "little")
        if size > min(_MAX_HEADER_BYTES, file.size - 8):
            raise ValueError("its header isn't one")
        table = json.loads(file.array(8, size).tobytes())
        if not isinstance(table, dict):
            raise ValueError("its header isn't a table")
        slices = {str(label): _slice(entry) for label, entry in table.items()}
        end = max((offset + count for offset, count, _ in slices.values()), default=0)
        if end != file.size:
            raise ValueError(f"it has {file.size} bytes instead of {end}")
        return cls(file, slices)

    def read(
        self, label: str, layout: MatrixLayout, num_threads: int
    ) -> _native.LinearWeight | None:
        """A matrix, or None if it isn't here. Raises NativeError if it is damaged."""
        if label not in self.slices:
            return None
        offset, num_bytes, checksum = self.slices[label]
        return _native.LinearWeight.read(
            file=self.file,
            offset=offset,
            num_bytes=num_bytes,
            checksum=checksum,
            num_threads=num_threads,
            **layout,
        )


def _slice(entry: object) -> tuple[int, int, int]:
    match entry:
        case [int(offset), int(num_bytes), int(checksum)] if (
            0 <= offset < 2**62 and 0 <= num_bytes < 2**62 and 0 <= checksum < 2**64
        ):
            return offset, num_bytes, checksum
    raise ValueError("its header isn't a table of matrices")


def write_packed_file(
    path: Path, matrices: dict[str, _native.LinearWeight], should_stop: Callable[[], bool]
) -> None:
    """Write and sync a file; it stays incomplete when told to stop. Raises OSError."""
    table = {
        label: (weight.num_bytes, 0 if should_stop() else weight.checksum())
        for label, weight in matrices.items()
    }
    pieces = chain([_header(table)], (weight.packed() for weight in matrices.values()))
    with path.open("wb", buffering=0) as file:
        for block in _blocks(pieces):
            data = block.data
            while data and not should_stop():
                data = data[os.write(file.fileno(), data) :]
        if not should_stop():
            os.fsync(file.fileno())


def _header(table: dict[str, tuple[int, int]]) -> Bytes:
    # The offsets' digits decide how long the header is, and its length decides the offsets.
    start = _PAGE_BYTES
    while True:
        slices, offset = {}, start
        for label, (num_bytes, checksum) in table.items():
            slices[label] = (offset, num_bytes, checksum)
            offset = _whole_pages(offset + num_bytes)
        text = json.dumps(slices).encode()
        if 8 + len(text) <= start:
            header = (len(text).to_bytes(8, "little") + text).ljust(start, b"\0")
            return np.frombuffer(header, np.uint8)
        start = _whole_pages(8 + len(text))


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _blocks(pieces: Iterable[Bytes]) -> Iterator[Bytes]:
    """The pieces, each from a page boundary on, in blocks of _WRITE_BYTES; the last is shorter."""
    block = np.zeros(_WRITE_BYTES, np.uint8)
    used = end = 0
    for piece in pieces:
        done = 0
        while done < len(piece):
            count = min(len(piece) - done, _WRITE_BYTES - used)
            block[used : used + count] = piece[done : done + count]  # it copies without the GIL
            done += count
            end = used + count
            used = _whole_pages(end)
            if used == _WRITE_BYTES:
                yield block
                block[:] = 0
                used = end = 0
    if end:
        yield block[:end]
