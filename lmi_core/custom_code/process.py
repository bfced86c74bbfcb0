"""One process that runs a model's code: started, loaded, spoken to in frames, ended."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from lmi_core.custom_code.errors import FailureKind, HandlerError, LoadError
from lmi_core.custom_code.frame import (
    PREFIX,
    Frame,
    FrameError,
    decode_head,
    encode_frame,
    frame_size,
)
from lmi_core.settings.custom_code_config import CustomCodeConfig
from lmi_core.text.printable import printable

log = logging.getLogger(__name__)

_ROOT = Path(__file__).parents[2]
# The working directory is the model's: it must not shadow what the process itself imports.
_BOOT = (
    "import sys; sys.path[:] = [path for path in sys.path if path]; sys.path.append(sys.argv[1]); "
    "from lmi_core.custom_code.child import main; sys.exit(main(int(sys.argv[2])))"
)
_HEAD_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_PIECE_BYTES = 1 << 20
"""Of what is longer, so much is copied at once."""
_MAX_LINE_BYTES = 1 << 13
_MAX_LINES_PER_TURN = 100
_END_TIMEOUT_S = 5.0
_OUTPUT_TIMEOUT_S = 0.5


class CustomCodeProcess:
    """A running process. All calls come from one event loop."""

    def __init__(
        self,
        config: CustomCodeConfig,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_exit: Callable[[], None],
    ) -> None:
        self._config = config
        self._process = process
        self._reader = reader
        self._writer = writer
        self._unsent: deque[bytes | memoryview] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._max_frame_bytes = config.max_output_bytes * config.batch_size + _HEAD_BYTES
        self._tasks = [
            asyncio.create_task(self._forward(process.stdout, logging.INFO, "stdout")),
            asyncio.create_task(self._forward(process.stderr, logging.WARNING, "stderr")),
            asyncio.create_task(self._watch(on_exit)),
        ]

    @classmethod
    async def start(cls, config: CustomCodeConfig, on_exit: Callable[[], None]) -> Self:
        """A process that has loaded the model and initialised its handler.

        ``on_exit`` is called once it has ended, for whatever reason. Raises LoadError.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                reader, writer = await asyncio.open_connection(sock=ours, limit=_READ_BYTES)
            except BaseException:
                ours.close()
                raise
            try:
                process = await _spawn(config, theirs.fileno())
            except BaseException:
                writer.transport.abort()
                raise
        if hidden := [name for name in config.withheld if name in os.environ]:
            log.info(
                "%s: its code doesn't get %s (option.handler_environment)",
                config.model_name,
                ", ".join(hidden),
            )
        self = cls(config, process, reader, writer, on_exit)
        try:
            await self._load()
        except BaseException:
            await self.kill()
            raise
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def send(self, head: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        """Write a frame; HandlerError when the process is gone."""
        try:
            self._put(encode_frame(head, blobs))
            if self._sending is not None:
                await asyncio.shield(self._sending)  # a frame that was begun is written whole
            await self._writer.drain()
        except (ConnectionError, FrameError) as error:
            raise HandlerError(FailureKind.CRASHED, _disconnected(str(error))) from None

    def post(self, head: dict[str, Any]) -> None:
        """Write a small frame without waiting; nothing happens when the process is gone."""
        if not self._writer.is_closing():
            self._put(encode_frame(head))

    def _put(self, frame: list[bytes]) -> None:
        """Frames are written one after the other, long ones a piece at a time."""
        if self._sending is None and sum(map(len, frame)) <= _PIECE_BYTES:
            self._writer.writelines(frame)
            return
        for part in frame:
            starts = range(0, len(part), _PIECE_BYTES)
            self._unsent.extend(memoryview(part)[at : at + _PIECE_BYTES] for at in starts)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_pieces())

    async def _send_pieces(self) -> None:
        try:
            while self._unsent:
                self._writer.write(self._unsent.popleft())
                await self._writer.drain()
        except ConnectionError:
            self._unsent.clear()
        finally:
            self._sending = None

    async def receive(self) -> Frame:
        """The next frame; HandlerError when there won't be one."""
        try:
            prefix = await self._reader.readexactly(PREFIX.size)
            num_bytes, head_bytes = frame_size(prefix, self._max_frame_bytes)
            text = await self._reader.readexactly(head_bytes)
            head, sizes = decode_head(text, num_bytes - head_bytes)
            return Frame(head, tuple([await self._read(size) for size in sizes]))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise HandlerError(
                FailureKind.CRASHED, _disconnected(await self._last_words())
            ) from None
        except FrameError as error:
            raise HandlerError(FailureKind.CRASHED, _disconnected(str(error))) from None

    async def _read(self, num_bytes: int) -> bytes:
        pieces = []
        while num_bytes:
            piece = await self._reader.read(num_bytes)
            if not piece:
                raise asyncio.IncompleteReadError(b"", num_bytes)
            pieces.append(piece)
            num_bytes -= len(piece)
        join = partial(b"".join, pieces)
        is_long = sum(map(len, pieces)) > _PIECE_BYTES
        return await asyncio.to_thread(join) if is_long else join()

    async def close(self) -> None:
        """Let the process end by itself, then make it."""
        self._writer.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_TIMEOUT_S):
                await self._process.wait()
        await self.kill()

    async def kill(self) -> None:
        """End the process and those it has started. Idempotent."""
        self._kill_group()
        self._writer.transport.abort()
        await self._process.wait()
        await asyncio.wait(self._tasks)  # Not gather: cancelled, it would cancel them.

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _load(self) -> None:
        config = self._config
        packages = [] if config.packages is None else [str(config.packages)]
        head = {
            "kind": "load",
            "path": str(config.path.absolute()),
            "function": config.function,
            "input_formatter": config.input_formatter,
            "output_formatter": config.output_formatter,
            "sys_path": [str(config.model_dir.absolute()), *packages],
            "properties": {**config.properties, **config.call_properties},
            "max_output_bytes": config.max_output_bytes,
        }
        try:
            async with asyncio.timeout(config.loading_timeout_s):
                await self.send(head)
                answer = (await self.receive()).head
        except TimeoutError:
            raise LoadError(
                f"{config.path} was not loaded within {config.loading_timeout_s:g} s "
                "(option.model_loading_timeout)"
            ) from None
        except HandlerError as error:
            raise LoadError(str(error)) from None
        if answer["kind"] != "loaded":
            raise LoadError(str(answer.get("error")), int(answer.get("code", 424)))

    async def _last_words(self) -> str:
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                code = await self._process.wait()
        except TimeoutError:
            return "it closed the connection"
        if code >= 0:
            return f"exit status {code}"
        return f"ended by {signal.Signals(-code).name}"

    async def _watch(self, on_exit: Callable[[], None]) -> None:
        await _exit_of(self._process)
        # Those that it has forked hold its socket and its output open.
        self._kill_group()
        with suppress(TimeoutError):
            async with asyncio.timeout(_OUTPUT_TIMEOUT_S):
                await self._process.wait()
        # A daemon that it has started, in a session of its own, holds the output open as long as it
        # lives, and ``wait`` would wait for that.
        self._process._transport.close()  # type: ignore[attr-defined]
        await self._process.wait()
        on_exit()

    async def _forward(self, stream: asyncio.StreamReader | None, level: int, name: str) -> None:
        assert stream is not None
        prefix = f"W-{self._process.pid}-{self._config.model_name}-{name}"
        await log_output(stream, level, prefix, lambda: self.has_ended)


async def log_output(
    stream: asyncio.StreamReader, level: int, prefix: str, has_ended: Callable[[], bool]
) -> None:
    """Log what code prints, line by line, in a quarter of the loop's time at most: code that prints
    faster waits for its pipe. What it has left when it ends is logged without pauses."""
    async for lines in _batches(stream):
        start = time.perf_counter()
        for line in lines:
            _log_line(level, prefix, line)
        if len(lines) == _MAX_LINES_PER_TURN:
            used_s = time.perf_counter() - start
            await asyncio.sleep(0 if has_ended() else 3 * used_s)


async def _batches(stream: asyncio.StreamReader) -> AsyncGenerator[list[bytes], None]:
    """A stream's lines, as many at once as the loop has time for; those too long are cut."""
    rest = b""
    while data := await stream.read(_READ_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        for first in range(0, len(lines), _MAX_LINES_PER_TURN):
            yield lines[first : first + _MAX_LINES_PER_TURN]
    if rest:
        yield [rest]


async def _spawn(config: CustomCodeConfig, descriptor: int) -> asyncio.subprocess.Process:
    python = config.python or sys.executable
    try:
        return await asyncio.create_subprocess_exec(
            python,
            *("-u", "-c", _BOOT, str(_ROOT), str(descriptor)),
            pass_fds=(descriptor,),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=config.model_dir,
            env=config.environment(os.environ),
            start_new_session=True,
        )
    except OSError as error:
        raise LoadError(f"{python} can't be started ({error.strerror or error})") from None


async def _exit_of(process: asyncio.subprocess.Process) -> None:
    """Wait for the process alone; ``wait`` also waits for all who hold its output open."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        await process.wait()
        return
    loop = asyncio.get_running_loop()
    has_ended = asyncio.Event()
    loop.add_reader(descriptor, has_ended.set)
    try:
        await has_ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _log_line(level: int, prefix: str, line: bytes) -> None:
    text = line[:_MAX_LINE_BYTES].decode("utf-8", "replace").rstrip()
    log.log(level, "%s: %s", prefix, printable(text.expandtabs(4)))


def _disconnected(why: str) -> str:
    return f"Python worker disconnected. ({why})" if why else "Python worker disconnected."
