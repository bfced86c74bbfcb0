"""One copy as the server sees it: a process with an engine of its own."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lmi_core.copies.connection import Connection
from lmi_core.copies.link import Link, LocalLink
from lmi_core.copies.outbox import Batch
from lmi_core.engine.handover import Handover
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.stats import EngineInfo, EngineStats
from lmi_core.errors import EngineError
from lmi_core.sandbox import message
from lmi_core.settings.engine_config import EngineConfig

log = logging.getLogger(__name__)

_END_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySettings:
    """What a copy is started with."""

    config: EngineConfig
    claimed_bytes: int = 0
    """What other models have of the machine's memory."""
    packs: bool = False
    """Whether it puts packed weights where all copies find them, before it loads its own."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of its process, besides those of the server."""
    log_level: int = logging.WARNING
    sent_s: float | None = None
    """The time by the server's clock, where the copy has another."""

    @property
    def cores(self) -> tuple[object, ...]:
        """Its part of the machine's, which another number of copies may change."""
        return self.config.num_threads, self.config.bound_cpus


class CopyProcess:
    """From its start to its end. All calls come from one event loop."""

    def __init__(
        self,
        copy_id: int,
        settings: CopySettings,
        on_batch: Callable[[CopyProcess, Batch], None],
        on_lost: Callable[[CopyProcess], None],
        progress: Callable[[str, int, int], None] | None,
        link: Link,
    ) -> None:
        self.link = link
        self.copy_id = copy_id
        self.settings = settings
        self.started_at = 0.0
        """Seconds since the epoch, when it was ready."""
        self.stats: EngineStats | None = None
        """The latest that it has sent; None: not ready."""
        self._heard_s = time.monotonic()
        self._asked_s = 0.0
        lora = settings.config.lora
        self.adapters: dict[str, Path] = {} if lora is None else dict(lora.adapters)
        """Those that it has."""
        self._on_batch = on_batch
        self._on_lost = on_lost
        self._progress = progress
        self._connection: Connection | None = None
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self.unread: dict[int, None] = {}
        """Requests that were sent, of which it hasn't said that it has them."""
        self._calls: dict[int, asyncio.Future[None]] = {}
        self._num_calls = 0
        self._gone: EngineError | None = None

    @property
    def pid(self) -> int:
        """Of one on this machine."""
        assert isinstance(self.link, LocalLink)
        return self.link.pid

    async def start(self) -> EngineInfo:
        """Start it and wait until its engine takes requests; raises what its start raised,
        EngineError where it ended without a word."""
        try:
            self._connection = await self.link.open(self._receive, self._lose)
            sent_s = None if self.link.is_local else time.monotonic()
            self._send("start", replace(self.settings, sent_s=sent_s))
            info = await self._ready
        except BaseException as error:
            await self.end(kill=True)
            if error is self._gone:
                raise EngineError(await self._why_not_ready()) from None
            raise
        self.started_at = time.time()
        return info

    def open(self, number: int, request: GenerationRequest, handover: Handover) -> None:
        self.unread[number] = None
        self._send("open", number, request, handover)

    def abort(self, number: int) -> None:
        self._send("abort", number)

    def unpin(self, session: str) -> None:
        self._send("unpin", session)

    def ask(self) -> None:
        """Have it say something."""
        if not self._asked_s:
            self._asked_s = time.monotonic()
            self._send("ask")

    @property
    def silent_s(self) -> float:
        """Since it last said something."""
        return time.monotonic() - self._heard_s

    @property
    def unanswered_s(self) -> float:
        """Since it was asked, if it hasn't said anything; else 0."""
        return time.monotonic() - self._asked_s if self._asked_s else 0.0

    async def load_adapter(self, name: str, path: Path) -> None:
        await self._call("load_adapter", name, path)
        self.adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        del self.adapters[name]
        await self._call("unload_adapter", name)

    def kill(self) -> None:
        """It isn't of use any more; ``on_lost`` follows."""
        self.link.kill()

    async def end(self, *, kill: bool = False) -> None:
        """Let it end by itself, in time, or at once, and leave one that doesn't. Idempotent."""
        if self._connection is not None:
            self._connection.close()
        with suppress(TimeoutError):
            if not kill:
                await asyncio.wait_for(self.link.ended(), _END_TIMEOUT_S)
        self.kill()
        try:
            await asyncio.wait_for(self.link.ended(), _END_TIMEOUT_S)
        except TimeoutError:
            log.error("copy %d (%s) doesn't end and is left", self.copy_id, self.link.name)

    def _send(self, *message: Any) -> None:
        if self._connection is not None:
            self._connection.send(message)

    async def last_words(self) -> str:
        """How it ended."""
        return await self.link.ended()

    async def _why_not_ready(self) -> str:
        words = await self.last_words()
        why = f"copy {self.copy_id} ended while it loaded the model ({words})"
        if words == f"signal {signal.SIGKILL:d}":
            why += ": the kernel does that where memory runs out; dmesg says it, fewer copies help"
        return why

    async def _call(self, kind: str, *arguments: Any) -> None:
        self._num_calls += 1
        call_id = self._num_calls
        self._calls[call_id] = answer = asyncio.get_running_loop().create_future()
        try:
            self._send(kind, call_id, *arguments)
            await answer
        finally:
            del self._calls[call_id]

    def _receive(self, value: Any) -> None:
        self._heard_s, self._asked_s = time.monotonic(), 0.0
        kind, *rest = value
        match kind:
            case "batch":
                self._on_batch(self, Batch(*rest))
            case "taken":
                self.unread.pop(rest[0], None)
            case "stats":
                self._take_stats(*rest)
            case "ready":
                info, self.stats = rest
                if not self._ready.done():
                    self._ready.set_result(info)
            case "failed":
                if not self._ready.done():
                    self._ready.set_exception(message.rebuilt(*rest[0]))
            case "answer":
                self._answer(*rest)
            case "log":
                name, level, text = rest
                logging.getLogger(name).log(level, "copy %d: %s", self.copy_id, text)
            case "progress":
                if self._progress is not None:
                    self._progress(*rest)

    def _take_stats(self, stats: EngineStats) -> None:
        self.stats = stats
        if not stats.is_healthy:
            log.error("copy %d is unhealthy and is ended", self.copy_id)
            self.kill()

    def _answer(self, call_id: int, error: tuple[Any, ...] | None) -> None:
        answer = self._calls.get(call_id)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(message.rebuilt(*error))

    def _lose(self) -> None:
        self._gone = gone = EngineError(f"copy {self.copy_id} of the model ended")
        if not self._ready.done():
            self._ready.set_exception(gone)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(gone)
        self.kill()  # one that has lost its connection hears of nothing
        self._on_lost(self)


def log_level() -> int:
    """The level of what copies are to send."""
    return logging.getLogger().getEffectiveLevel()
