"""Reading of GGUF files: metadata and the table of tensors, with every rule of the format checked.

Format: "GGUF", then little-endian: u32 version, u64 number of tensors, u64 number of metadata
pairs; each pair is a key (u64 length, UTF-8), u32 type and a value; each tensor a name, u32 number
of dimensions, u64 dimensions (the fastest first), u32 type, u64 offset from where the data starts:
the next multiple of general.alignment.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lmi_core import _native
from lmi_core.errors import ModelError
from lmi_core.files import check_regular
from lmi_core.weights.gguf.names import PATTERN, SPLIT_NAME, is_later_part
from lmi_core.weights.gguf.types import OTHER_TYPES, TYPES
from lmi_core.weights.safetensors_file import TensorInfo

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_PAIRS = 1 << 16
_MAX_TENSORS = 1 << 17
_MAX_ITEMS = 1 << 22
"""Of a list, which is more than any vocabulary or its merges have."""
_MAX_NAME = 1 << 16
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A model's file, or its parts as one."""

    path: Path
    """Of the first part."""
    metadata: Mapping[str, Any]
    """Numbers, strings, lists of strings, and arrays of numbers."""
    tensors: Mapping[str, TensorInfo]


def read_gguf(path: Path) -> GgufFile:
    """The file at ``path``, and those that it says belong to it.

    Raises ModelError naming the file and the fault, before memory is spent on what it claims.
    """
    first = _read_part(path)
    count = first.metadata.get("split.count", 0)
    if count in (0, 1):
        return first
    parts = [first, *(_read_part(name) for name in _other_parts(path, first.metadata, count))]
    tensors: dict[str, TensorInfo] = {}
    for number, part in enumerate(parts):
        if part.metadata.get("split.no") != number:
            where = part.metadata.get("split.no")
            raise fault(part.path, f"is part {where} by its own word, not {number}")
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise fault(part.path, f"holds {name!r}, which {tensors[name].path.name} has, too")
            tensors[name] = tensor
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise fault(
            path, f"says that its {count} parts hold {total} tensors; they hold {len(tensors)}"
        )
    return GgufFile(path, first.metadata, tensors)


def gguf_of(directory: Path) -> Path | None:
    """The GGUF file of a directory without safetensors, of several parts the first; None: there is
    none. Raises ModelError if there are several."""
    if any(directory.glob("*.safetensors")):
        return None
    files = [path for path in sorted(directory.glob(PATTERN)) if not is_later_part(path)]
    if len(files) > 1:
        raise ModelError(
            f"{directory} holds {len(files)} models in GGUF ({', '.join(f.name for f in files[:4])}"
            f"{', ...' if len(files) > 4 else ''}): name one of these files",
            field="model",
        )
    return files[0] if files else None


def _other_parts(path: Path, metadata: Mapping[str, Any], count: object) -> list[Path]:
    match = SPLIT_NAME.fullmatch(path.name)
    if not isinstance(count, int) or match is None or int(match[4]) != count:
        raise fault(
            path,
            f"is one of {count} parts, whose names must end with -00001-of-{count:>05}.gguf and so "
            "on",
        )
    if int(match[2]) != 1:
        raise ModelError(
            f"{path} is a later part of a model: name its first, {match[1]}00001{match[3]}",
            field="model",
        )
    names = [f"{match[1]}{number:05}{match[3]}" for number in range(2, count + 1)]
    missing = [name for name in names if not (path.parent / name).exists()]
    if missing:
        raise ModelError(
            f"{path.parent} lacks {len(missing)} of {count} parts of the model: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}; fetch them",
            field=path.name,
        )
    return [path.parent / name for name in names]


def _read_part(path: Path) -> GgufFile:
    try:
        check_regular(path)
        file = _native.MappedFile(str(path))
    except (OSError, _native.NativeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"{path} can't be read: {reason}", field=path.name) from None
    reader = _Reader(path, file)
    num_tensors, num_pairs = reader.start()
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = reader.string("a metadata key", _MAX_NAME)
        if key in metadata:
            raise reader.fault(f"holds metadata {key[:80]!r} twice")
        metadata[key] = reader.value(key)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 8 <= alignment <= 65536 or alignment & (alignment - 1):
        raise reader.fault(
            f"has general.alignment {str(alignment)[:40]}, but must have a power of 2"
        )
    entries = [reader.tensor(alignment) for _ in range(num_tensors)]
    start = -(-reader.at // alignment) * alignment
    return GgufFile(path, metadata, reader.place(entries, start))


def fault(path: Path, problem: str) -> ModelError:
    return ModelError(
        f"{path}: {problem}; the file is damaged or not GGUF, fetch it again", field=path.name
    )


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    type: int
    shape: tuple[int, ...]
    offset: int


class _Reader:
    """A place in a file that is read from its start on."""

    def __init__(self, path: Path, file: _native.MappedFile) -> None:
        self.at = 0
        self._path = path
        self._num_bytes = file.size
        self._bytes = file.array(0, file.size).data

    def fault(self, problem: str) -> ModelError:
        return fault(self._path, problem)

    def start(self) -> tuple[int, int]:
        """Read what comes first: the number of tensors, and of metadata's pairs."""
        if self._num_bytes < 24 or bytes(self._bytes[:4]) != MAGIC:
            raise self.fault(f"holds {self._num_bytes} bytes that don't begin as a GGUF file")
        version, num_tensors, num_pairs = struct.unpack_from("<IQQ", self._bytes, 4)
        if version not in _VERSIONS:
            raise ModelError(
                f"{self._path} is version {version} of GGUF; {', '.join(map(str, _VERSIONS))} can "
                "be read: convert it anew",
                field=self._path.name,
            )
        if num_tensors > _MAX_TENSORS or num_pairs > _MAX_PAIRS:
            raise self.fault(f"claims {num_tensors} tensors and {num_pairs} pairs of metadata")
        self.at = 24
        return num_tensors, num_pairs

    def number(self, format: str, what: str) -> Any:
        size = struct.calcsize(format)
        self._require(size, what)
        (value,) = struct.unpack_from(format, self._bytes, self.at)
        self.at += size
        return value

    def string(self, what: str, most: int | None = None) -> str:
        size = self.number("<Q", what)
        if most is not None and size > most:
            raise self.fault(f"has {what} of {size} bytes")
        self._require(size, what)
        text = bytes(self._bytes[self.at : self.at + size])
        self.at += size
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise self.fault(f"has {what} that isn't UTF-8") from None

    def value(self, key: str) -> Any:
        what = f"metadata {key[:80]!r}"
        type_id = self.number("<I", what)
        if type_id == _STRING:
            return self.string(what)
        if type_id == _ARRAY:
            return self._list(what)
        return self._numbers(type_id, 1, what)[0].item()

    def _list(self, what: str) -> list[str] | npt.NDArray[np.generic]:
        type_id, count = self.number("<I", what), self.number("<Q", what)
        if count > _MAX_ITEMS:
            raise self.fault(f"has {what} of {count} items")
        if type_id != _STRING:
            return self._numbers(type_id, count, what)
        self._require(8 * count, what)
        return [self.string(what) for _ in range(count)]

    def _numbers(self, type_id: int, count: int, what: str) -> npt.NDArray[np.generic]:
        if type_id not in _NUMBERS:
            raise self.fault(f"has {what} of type {type_id}, which there isn't")
        dtype = np.dtype(_NUMBERS[type_id])
        size = dtype.itemsize * count
        self._require(size, what)
        raw = self._bytes[self.at : self.at + size]
        self.at += size
        return np.frombuffer(raw, np.uint8 if dtype == np.bool_ else dtype).astype(dtype)

    def tensor(self, alignment: int) -> _Entry:
        name = self.string("a tensor's name", _MAX_NAME)
        what = f"tensor {name[:80]!r}"
        num_dimensions = self.number("<I", what)
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self.fault(f"has {what} of {num_dimensions} dimensions")
        shape = tuple(self.number("<Q", what) for _ in range(num_dimensions))[::-1]
        type_id, offset = self.number("<I", what), self.number("<Q", what)
        if offset % alignment:
            raise self.fault(f"has {what} at {offset}, no multiple of {alignment}")
        return _Entry(name, type_id, shape, offset)

    def place(self, entries: list[_Entry], start: int) -> dict[str, TensorInfo]:
        """Where the tensors lie, which mustn't meet or leave the file."""
        tensors: dict[str, TensorInfo] = {}
        end, last = 0, ""
        for entry in sorted(entries, key=lambda entry: entry.offset):
            if entry.name in tensors:
                raise self.fault(f"holds tensor {entry.name[:80]!r} twice")
            size = self._num_tensor_bytes(entry)
            if entry.offset < end:
                raise self.fault(f"has tensors {last[:80]!r} and {entry.name[:80]!r} in one place")
            end, last = entry.offset + size, entry.name
            if start + end > self._num_bytes:
                raise self.fault(
                    f"holds {self._num_bytes} bytes, but tensor {entry.name[:80]!r} ends at "
                    f"{start + end}"
                )
            dtype = TYPES[entry.type].name
            tensors[entry.name] = TensorInfo(
                entry.name, dtype, entry.shape, self._path, start + entry.offset, size
            )
        return {entry.name: tensors[entry.name] for entry in entries}

    def _num_tensor_bytes(self, entry: _Entry) -> int:
        what = f"tensor {entry.name[:80]!r}"
        if entry.type not in TYPES:
            if entry.type not in OTHER_TYPES:
                raise self.fault(f"has {what} of type {entry.type}, which there isn't")
            raise ModelError(
                f"{self._path} has {what} in {OTHER_TYPES[entry.type]}; "
                f"{', '.join(known.name for known in TYPES.values())} can be read: fetch the model "
                "in one of these",
                field=self._path.name,
            )
        kind = TYPES[entry.type]
        if any(size < 1 for size in entry.shape) or entry.shape[-1] % kind.num_weights:
            raise self.fault(
                f"has {what} {[*entry.shape]} in {kind.name}, whose rows are of whole blocks of "
                f"{kind.num_weights}"
            )
        return math.prod(entry.shape) // kind.num_weights * kind.num_bytes

    def _require(self, num_bytes: int, what: str) -> None:
        if num_bytes > self._num_bytes - self.at:
            raise self.fault(
                f"ends in {what}: {num_bytes} more bytes are needed, {self._num_bytes - self.at} "
                "are left"
            )
