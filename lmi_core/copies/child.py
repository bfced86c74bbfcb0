"""The process of a copy: an engine, and a socket on which requests come and events go."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmi_core.copies.connection import Connection
from lmi_core.copies.outbox import Batch, CopyStream, Outbox, SentObserver
from lmi_core.copies.process import CopySettings
from lmi_core.copies.sealed import NUM_SECRET_BYTES, SealedConnection
from lmi_core.engine.engine import Engine
from lmi_core.engine.handover import Handover
from lmi_core.engine.request import GenerationRequest
from lmi_core.runners.cpu.memory_needs import HOST_MEMORY, check_memory
from lmi_core.sandbox import message
from lmi_core.weights.repack_cache import discard_partial_files

if TYPE_CHECKING:
    from lmi_core.models.found_model import FoundModel
    from lmi_core.settings.engine_config import EngineConfig

_CONNECT_S = 60.0
"""In which somebody must come who has the secret."""
_STATS_S = 0.2
"""Statistics follow activity after so long, and then no more often."""
_WATCH_S = 0.5
"""How often a copy looks after its ranks."""


class Child:
    """Serves until the other end closes the connection."""

    def __init__(self, connection: Callable[..., Connection] = Connection) -> None:
        """``connection``: makes its end of what takes messages and the loss of the other end."""
        self._loop = asyncio.get_running_loop()
        self.connection = connection(self._receive, self._close, self._hold)
        self._outbox = Outbox(self._send_batch)
        self._engine: Engine | None = None
        self._requests: dict[int, str] = {}
        self._opening: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_closed = asyncio.Event()
        self._stats_are_due = False
        self._ahead_s = 0.0
        """By how much its clock is ahead of the server's."""

    async def serve(self) -> None:
        await self._has_closed.wait()
        if self._engine is None:  # threads that load don't let the process end
            discard_partial_files()
            os._exit(1)
        await self._engine.stop(drain=False)

    def log(self, record: logging.LogRecord) -> None:
        """Send it to be logged at the other end; from any thread."""
        message = ("log", record.name, record.levelno, _text(record))
        self._loop.call_soon_threadsafe(self.connection.send, message)

    def _receive(self, value: Any) -> None:
        kind, *rest = value
        match kind:
            case "open":
                self._open(*rest)
            case "abort":
                self._abort(*rest)
            case "unpin" if self._engine is not None:
                self._engine.unpin(*rest)
                self._send_stats_soon()
            case "ask":
                self._send_stats()
            case "start":
                self._run(self._start(*rest))
            case "load_adapter" | "unload_adapter":
                self._run(self._change_adapters(kind, *rest))

    def _hold(self, is_full: bool) -> None:
        """No more steps while the other end doesn't read what they bring."""
        if self._engine is not None:
            self._engine.hold(is_held=is_full)

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _start(self, settings: CopySettings) -> None:
        _send_logs(self, settings.log_level)
        if settings.sent_s is not None:
            self._ahead_s = time.monotonic() - settings.sent_s
        HOST_MEMORY.claim(self, settings.claimed_bytes)
        if settings.config.bound_cpus:
            os.sched_setaffinity(0, chain.from_iterable(settings.config.bound_cpus))
        observer = SentObserver(self._outbox)
        try:
            asked: EngineConfig | FoundModel = settings.config
            if settings.packs:
                asked = await asyncio.to_thread(self._pack, settings)
            engine = Engine(
                asked,
                observer=observer,
                progress=self._progress,
                has_fingerprint=False,
            )
            await engine.start()
        except Exception as error:
            self.connection.send(("failed", message.portable(error)))
            self.connection.close()
            return
        self._engine = engine
        self.connection.send(("ready", engine.info, engine.stats()))
        if engine.info.runner.num_ranks > 1:
            self._watch_ranks()

    def _watch_ranks(self) -> None:
        """Say it when a rank is lost: without requests nobody else would notice."""
        if self._engine is not None and self._engine.healthy:
            self._loop.call_later(_WATCH_S, self._watch_ranks)
        else:
            self._send_stats()

    def _pack(self, settings: CopySettings) -> FoundModel:
        from lmi_core.runners.cpu.cpu_model import find_cpu_model
        from lmi_core.runners.cpu.cpu_runner import keep_packed

        found = find_cpu_model(settings.config)
        check_memory(found, settings.claimed_bytes)
        keep_packed(found, self._progress)
        return found

    def _progress(self, what: str, num_done: int, num_all: int) -> None:
        message = ("progress", what, num_done, num_all)
        self._loop.call_soon_threadsafe(self.connection.send, message)

    def _open(self, number: int, request: GenerationRequest, handover: Handover) -> None:
        self.connection.send(("taken", number))
        self._requests[number] = request.request_id
        handover = handover.by_clock(self._ahead_s, time.monotonic())
        task = self._run(self._admit(number, request, handover))
        self._opening[number] = task
        task.add_done_callback(lambda _: self._opening.pop(number, None))

    async def _admit(self, number: int, request: GenerationRequest, handover: Handover) -> None:
        assert self._engine is not None
        stream = CopyStream(number, self._outbox)
        try:
            await self._engine.open(request, stream, handover)
        except Exception as error:
            stream.finish(error)
            stream.notify()

    def _abort(self, number: int) -> None:
        opening = self._opening.pop(number, None)
        if opening is not None:
            opening.cancel()
        request_id = self._requests.pop(number, None)
        if request_id is not None and self._engine is not None:
            self._engine.abort(request_id)

    async def _change_adapters(self, kind: str, call_id: int, name: str, *path: Path) -> None:
        assert self._engine is not None
        error = None
        try:
            await getattr(self._engine, kind)(name, *path)
        except Exception as caught:
            error = message.portable(caught)
        self.connection.send(("answer", call_id, error))

    def _send_batch(self, batch: Batch) -> None:
        assert self._engine is not None
        if not self._engine.healthy and not self._has_closed.is_set():
            # What failed here goes on in another copy.
            discard_partial_files()
            os._exit(1)
        for number, _ in batch.ends:
            self._requests.pop(number, None)
        self.connection.send(("batch", *batch))
        self._send_stats_soon()

    def _send_stats_soon(self) -> None:
        if not self._stats_are_due:
            self._stats_are_due = True
            self._loop.call_later(_STATS_S, self._send_stats)

    def _send_stats(self) -> None:
        self._stats_are_due = False
        if self._engine is not None:
            self.connection.send(("stats", self._engine.stats()))

    def _close(self) -> None:
        self._has_closed.set()


class _LogSender(logging.Handler):
    def __init__(self, child: Child) -> None:
        super().__init__()
        self._child = child

    def emit(self, record: logging.LogRecord) -> None:
        self._child.log(record)


def _send_logs(child: Child, level: int) -> None:
    root = logging.getLogger()
    root.setLevel(level)
    root.addHandler(_LogSender(child))


def _text(record: logging.LogRecord) -> str:
    return logging.Formatter("%(message)s").format(record)


async def _serve(connection: socket.socket) -> None:
    child = Child()
    await asyncio.get_running_loop().create_connection(lambda: child.connection, sock=connection)
    await child.serve()


async def _listen(host: str, secret: bytes) -> None:
    loop = asyncio.get_running_loop()
    proved: asyncio.Future[Child] = loop.create_future()

    def arrive() -> Connection:
        def on_proved() -> None:
            if not proved.done():
                proved.set_result(child)

        sealed = partial(SealedConnection, secret=secret, dials=False, on_proved=on_proved)
        child = Child(sealed)
        return child.connection

    server = await loop.create_server(arrive, host, 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    os.dup2(2, 1)  # whoever reads the port reads no more, and a full pipe would stop who prints
    async with asyncio.timeout(_CONNECT_S):
        child = await proved
    server.close()
    await child.serve()


def main(descriptor: int) -> int:
    """Serve the socket ``descriptor``. Signals are the server's business: the copy ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    asyncio.run(_serve(socket.socket(fileno=descriptor)))
    return 0


def listen(host: str) -> int:
    """Serve who first proves to have the secret, which comes by stdin, and end with them, or with
    stdin. Writes the port to stdout."""
    secret = sys.stdin.buffer.read(NUM_SECRET_BYTES)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    asyncio.run(_listen(host, secret))
    return 0


def _end_with_stdin() -> None:
    sys.stdin.buffer.read(1)
    os._exit(0)
