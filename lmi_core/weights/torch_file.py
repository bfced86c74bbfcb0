"""Where the tensors lie in a file that ``torch.save`` wrote: without torch, and without running it.

Format (torch/serialization.py): a zip archive whose entries aren't compressed, ``*/data.pkl`` with
the objects and ``*/data/<key>`` with the bytes of a storage. Before PyTorch 1.6: pickles one after
the other (magic number, protocol, system, objects, keys of storages), then each storage as its
number of elements in 8 bytes and its bytes. Of the objects, which are a pickle, only the names that
tensors are made of are understood; any other one is an error, and nothing of it is called.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from lmi_core.errors import ModelError
from lmi_core.files import open_regular
from lmi_core.weights.safetensors_file import DTYPE_BITS, TensorInfo, check_is_no_pointer

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_ZIP = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<26xHH")
"""Of an entry: the lengths of its name and its extra field are its last fields."""
_MAX_PICKLE_BYTES = 256 << 20
_STORAGES = {
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "DoubleStorage": "F64",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
_WRAPPERS = ("state_dict", "model", "module")
"""Keys under which training programs put the tensors."""
_FAULTS = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    struct.error,
    EOFError,
    AttributeError,
    TypeError,
    ValueError,
    LookupError,
    OverflowError,
    RecursionError,
    NotImplementedError,
    MemoryError,
)
"""What pickles and archives that are damaged, or were made to do harm, raise."""


@dataclass(frozen=True, slots=True)
class _StorageType:
    dtype: str


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    dtype: str


@dataclass(frozen=True, slots=True)
class _Tensor:
    storage: _Storage
    first: int
    """Element of the storage."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def is_in_order(self) -> bool:
        """Whether its elements lie row by row, without gaps."""
        num_elements = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != num_elements:
                return prod(self.shape) == 0
            num_elements *= size
        return True


_Places = Mapping[str, tuple[int, int]]
"""Of storages by their keys: offset in the file, and bytes."""


def read_torch_file(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a file by name; raises ModelError, naming the file, for what isn't a mapping
    of names to tensors, is damaged, or has tensors whose elements aren't in order."""
    try:
        with open_regular(path) as file:
            head = file.read(8)
            check_is_no_pointer(path, head)
            file.seek(0)
            read = _read_archive if head.startswith(_ZIP) else _read_pickles
            objects, places = read(file)
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}", field=path.name) from error
    except _FAULTS as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelError(
            f"{path}: {reason}; the file is damaged, or holds more than the tensors of a model: "
            "fetch it again, or give the model as safetensors",
            field=path.name,
        ) from None
    tensors = {
        name: _place(path, name, value, places)
        for name, value in _state(objects).items()
        if isinstance(value, _Tensor)
    }
    if not tensors:
        raise ModelError(f"{path} holds no tensors by their names", field=path.name)
    return tensors


def _state(objects: object) -> Mapping[str, object]:
    for _ in _WRAPPERS:
        if not isinstance(objects, dict):
            return {}
        inner = next((objects[key] for key in _WRAPPERS if key in objects), None)
        if not isinstance(inner, dict):
            break
        objects = inner
    assert isinstance(objects, dict)
    return {name: value for name, value in objects.items() if isinstance(name, str)}


def _place(path: Path, name: str, tensor: _Tensor, places: _Places) -> TensorInfo:
    if not tensor.is_in_order:
        raise ModelError(
            f"{path}: {name} {list(tensor.shape)} isn't stored row by row; give the model as "
            "safetensors",
            field=path.name,
        )
    offset, storage_bytes = places.get(tensor.storage.key, (0, -1))
    item_bytes = DTYPE_BITS[tensor.storage.dtype] // 8
    first, num_bytes = tensor.first * item_bytes, prod(tensor.shape) * item_bytes
    if first + num_bytes > storage_bytes:
        raise ModelError(
            f"{path}: {name} {list(tensor.shape)} ends beyond its storage; the file is damaged, "
            "fetch it again",
            field=path.name,
        )
    return TensorInfo(name, tensor.storage.dtype, tensor.shape, path, offset + first, num_bytes)


def _read_archive(file: BinaryIO) -> tuple[object, _Places]:
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        objects = next(name for name in [*entries, "data.pkl"] if name.endswith("data.pkl"))
        root = objects.removesuffix("data.pkl")
        if entries[objects].file_size > _MAX_PICKLE_BYTES:
            raise ValueError(f"its list of tensors has {entries[objects].file_size} bytes")
        if root + "byteorder" in entries and archive.read(root + "byteorder") != b"little":
            raise ValueError("its numbers are big-endian")
        with archive.open(objects) as stream:
            value = _Unpickler(stream).load()
        places = {
            name.removeprefix(root + "data/"): _place_of_entry(file, entry)
            for name, entry in entries.items()
            if name.startswith(root + "data/")
        }
    return value, places


def _place_of_entry(file: BinaryIO, entry: zipfile.ZipInfo) -> tuple[int, int]:
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{entry.filename[:80]} is compressed")
    file.seek(entry.header_offset)
    name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    offset = entry.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
    if offset + entry.file_size > file.seek(0, 2):
        raise ValueError(f"{entry.filename[:80]} ends beyond the file")
    return offset, entry.file_size


def _read_pickles(file: BinaryIO) -> tuple[object, _Places]:
    if (_Unpickler(file).load(), _Unpickler(file).load()) != (_MAGIC, _PROTOCOL):
        raise ValueError("torch.save hasn't written it")
    _Unpickler(file).load()
    unpickler = _Unpickler(file)
    value = unpickler.load()
    places = {}
    for key in _Unpickler(file).load():
        item_bytes = DTYPE_BITS[unpickler.storages[key].dtype] // 8
        num_bytes = int.from_bytes(file.read(8), "little") * item_bytes
        offset = file.tell()
        if offset + num_bytes > file.seek(0, 2):
            raise ValueError("it ends too early")
        places[key] = offset, num_bytes
        file.seek(offset + num_bytes)
    return value, places


class _Unpickler(pickle._Unpickler):
    """Knows what tensors are made of and nothing else.

    Python's own class, since that in C takes what memory a file says for its table of objects.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file, encoding="utf-8")
        self.storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _StorageType(_STORAGES[name])
        known: Callable[..., object] | None = _KNOWN.get((module, name))
        if known is None:
            raise pickle.UnpicklingError(
                f"it holds {module[:80]}.{name[:80]}, which isn't a tensor"
            )
        return known

    def persistent_load(self, pid: Any) -> _Storage:
        """``("storage", type, key, device, elements)``, and, in old files, the view that it is."""
        kind, storage_type, key, _, _, *view = pid
        if kind != "storage" or not isinstance(storage_type, _StorageType) or any(view):
            raise pickle.UnpicklingError(f"it holds {str(pid)[:80]}, which isn't a storage")
        return self.storages.setdefault(str(key), _Storage(str(key), storage_type.dtype))


def _tensor(
    storage: object, first: object, shape: object, strides: object, *rest: object
) -> _Tensor:
    if not isinstance(storage, _Storage) or not _are_counts((first,)):
        raise pickle.UnpicklingError("a tensor has no storage")
    if not _are_counts(shape) or not _are_counts(strides) or len(shape) != len(strides):  # type: ignore[arg-type]
        raise pickle.UnpicklingError("a tensor has no shape")
    return _Tensor(storage, first, shape, strides)  # type: ignore[arg-type]


def _are_counts(values: object) -> bool:
    return isinstance(values, tuple) and all(type(v) is int and v >= 0 for v in values)


_KNOWN: dict[tuple[str, str], Callable[..., object]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): lambda data, *rest: data,
}
