"""A handler's process: loads a ``model.py`` and answers the server's frames, one after the other.

The main thread runs the model's code. A second thread reads frames, so that a cancellation arrives
while the code runs, and ends the process when the server is gone.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import queue
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from lmi_core.custom_code.child_calls import Calls
from lmi_core.custom_code.child_formatter import Formatter
from lmi_core.custom_code.child_input import InputFormatter
from lmi_core.custom_code.frame import (
    PREFIX,
    Frame,
    FrameError,
    decode_frame,
    encode_frame,
    frame_size,
)

_COMPAT = Path(__file__).parent / "compat"
_GRACE_S = 10.0


class Channel:
    """The process's end of the socket. Copies of the process that the model's code forks end where
    they would write to it: each call has one answer."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pid = os.getpid()

    def read(self) -> Frame | None:
        """The next frame, or None when the server has closed the connection."""
        prefix = self._read(PREFIX.size)
        if prefix is None:
            return None
        num_bytes, head_bytes = frame_size(prefix)
        body = self._read(num_bytes)
        return None if body is None else decode_frame(body, head_bytes)

    def write(self, head: dict[str, Any], *blobs: bytes) -> None:
        if os.getpid() != self._pid:
            os._exit(0)
        for piece in encode_frame(head, blobs):
            self._connection.sendall(piece)

    def _read(self, num_bytes: int) -> bytes | None:
        buffer = bytearray(num_bytes)
        view = memoryview(buffer)
        at = 0
        while at < num_bytes:
            received = self._connection.recv_into(view[at:])
            if not received:
                return None
            at += received
        return bytes(buffer)


class Child:
    """The process: what was loaded, and the loop that answers."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._inbox: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._cancelled: set[int] = set()
        self._calls: Calls | None = None
        self._formatter: Formatter | None = None
        self._input_formatter: InputFormatter | None = None

    def run(self) -> int:
        """Answer until the server closes the connection; the exit code."""
        first = self._channel.read()
        if first is None:
            return 0
        threading.Thread(target=self._read_frames, daemon=True, name="lmi-frames").start()
        try:
            self._load(first.head)
        except Exception as error:
            traceback.print_exc()
            is_memory = type(error).__name__ in ("OutOfMemoryError", "MemoryError")
            head = {"kind": "failed", "code": 507 if is_memory else 424, "error": _describe(error)}
            self._channel.write(head)
            return 1
        self._channel.write({"kind": "loaded"})
        while (frame := self._inbox.get()) is not None:
            self._answer(frame)
        return 0

    def _answer(self, frame: Frame) -> None:
        match frame.head["kind"]:
            case "call" if self._calls is not None:
                self._calls.answer(frame)
            case "format" if self._formatter is not None:
                self._formatter.answer(frame)
            case "read" if self._input_formatter is not None:
                self._input_formatter.answer(frame)
            case "forget_input" if self._input_formatter is not None:
                self._input_formatter.forget(frame.head["id"])
            case "forget" if self._formatter is not None:
                self._formatter.forget(frame.head["stream"])
            case kind:
                raise FrameError(f"a frame of kind {kind!r} is not expected")

    def _load(self, head: dict[str, Any]) -> None:
        sys.path[:0] = head["sys_path"]
        djl = _djl_python()
        module = _import_file(Path(head["path"]))
        if head["function"] is not None:
            self._calls = Calls(
                djl,
                _function(module, head["function"]),
                self._channel.write,
                self._cancelled,
                head["max_output_bytes"],
            )
            self._calls.initialise(head["properties"])
        write, reader = self._channel.write, None
        if head["input_formatter"] is not None:
            function = _function(module, head["input_formatter"])
            reader = InputFormatter(djl, function, write, head["properties"])
        if head["output_formatter"] is not None:
            function = _function(module, head["output_formatter"])
            self._formatter = Formatter(djl, function, write, reader)
        self._input_formatter = reader

    def _read_frames(self) -> None:
        try:
            while (frame := self._channel.read()) is not None:
                if frame.head["kind"] == "cancel":
                    self._cancelled.add(frame.head["id"])
                else:
                    self._inbox.put(frame)
        except (OSError, FrameError, KeyError):
            traceback.print_exc()
        self._inbox.put(None)
        # Code that doesn't come back would keep the process alive after its server.
        time.sleep(_GRACE_S)
        os._exit(1)


def _djl_python() -> ModuleType:
    """The package that model code imports: an installed one, else ours under that name."""
    if importlib.util.find_spec("djl_python") is not None:
        return importlib.import_module("lmi_core.custom_code.compat.djl_python")
    sys.path.append(str(_COMPAT))
    return importlib.import_module("djl_python")


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} can't be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _function(module: ModuleType, name: str) -> Any:
    function = getattr(module, name, None)
    if not callable(function):
        raise AttributeError(f"{module.__file__} has no function {name}")
    return function


def _describe(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("djl_python."):
        text += (
            "; this server brings djl_python's Input, Output and formatters only, and "
            "'from lmi_core import Engine' runs a model"
        )
    return text


def main(descriptor: int) -> int:
    """Serve the connection that the server passed on; the exit code."""
    faulthandler.enable()
    os.set_inheritable(descriptor, False)
    with socket.socket(fileno=descriptor) as connection:
        connection.setblocking(True)
        return Child(Channel(connection)).run()
