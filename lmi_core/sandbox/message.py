"""What parent and child send each other: pickles with their large buffers beside them.

Layout: uint32 number of parts, their lengths as uint64 (both big-endian), the parts; the first is
the pickle. Both ends are this package: what is unpickled, it has pickled itself.
"""

from __future__ import annotations

import io
import pickle
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

from lmi_core.errors import EngineError

_COUNT = struct.Struct(">I")
_MAX_PARTS = 1024


class MessageTooLongError(Exception):
    """A message is longer than its receiver takes."""


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer], known: Any) -> None:
        super().__init__(file, 5, buffer_callback=buffers.append)
        self._known = known

    def persistent_id(self, obj: Any) -> str | None:
        return "known" if self._known is not None and obj is self._known else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, buffers: Sequence[bytearray], known: Any) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._known = known

    def persistent_load(self, pid: Any) -> Any:
        return self._known


def encode(value: Any, *, known: Any = None) -> list[bytes | memoryview]:
    """The parts of a message. In the place of the object ``known`` the receiver has its own."""
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    _Pickler(file, buffers, known).dump(value)
    # Not its getbuffer(): a cycle that holds one crashes the collector of Python 3.12.1.
    return [file.getvalue(), *(buffer.raw() for buffer in buffers)]


def decode(parts: Sequence[bytearray], *, known: Any = None) -> Any:
    return _Unpickler(parts[0], parts[1:], known).load()  # type: ignore[arg-type]


def head(parts: Sequence[bytes | memoryview]) -> bytes:
    """What goes before the parts of a message."""
    sizes = [len(part) for part in parts]
    return _COUNT.pack(len(parts)) + struct.pack(f">{len(parts)}Q", *sizes)


def take(received: bytearray) -> list[bytearray] | None:
    """Remove the next message's parts from what was received; None while they aren't all there."""
    if len(received) < _COUNT.size:
        return None
    [num_parts] = _COUNT.unpack_from(received)
    start = _COUNT.size + 8 * num_parts
    if len(received) < start:
        return None
    sizes = struct.unpack_from(f">{num_parts}Q", received, _COUNT.size)
    if len(received) < start + sum(sizes):
        return None
    parts = []
    for size in sizes:
        parts.append(received[start : start + size])
        start += size
    del received[:start]
    return parts


def send(connection: socket.socket, parts: Sequence[bytes | memoryview]) -> None:
    connection.sendall(head(parts))
    for part in parts:
        connection.sendall(part)


def receive(connection: socket.socket, max_bytes: int) -> list[bytearray]:
    """The parts of the next message; EOFError when the other end is gone."""
    [num_parts] = _COUNT.unpack(_exactly(connection, _COUNT.size))
    if not 0 < num_parts <= _MAX_PARTS:
        raise MessageTooLongError(f"{num_parts} parts")
    sizes = struct.unpack(f">{num_parts}Q", _exactly(connection, 8 * num_parts))
    if sum(sizes) > max_bytes:
        raise MessageTooLongError(f"{sum(sizes)} bytes, at most {max_bytes} are taken")
    return [_exactly(connection, size) for size in sizes]


def _exactly(connection: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    view, position = memoryview(data), 0
    while position < num_bytes:
        received = connection.recv_into(view[position:])
        if not received:
            raise EOFError("the other end closed the connection")
        position += received
    return data


def raised(error: Exception) -> tuple[type[Exception], tuple[Any, ...], dict[str, Any]]:
    """An exception as what ``rebuilt`` makes it of again, whatever its constructor takes."""
    return type(error), error.args, error.__dict__


def portable(error: Exception) -> tuple[Any, ...]:
    """An error's parts for ``rebuilt``; of one that can't be sent, its text."""
    parts = raised(error)
    try:
        encode(parts)
    except Exception:  # its attributes may be anything
        return raised(EngineError(f"{type(error).__name__}: {error}"))
    return parts


def rebuilt(kind: type[Exception], args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


Call = tuple[Callable[..., Any], tuple[Any, ...]]
