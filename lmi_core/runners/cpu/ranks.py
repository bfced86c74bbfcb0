"""The other ranks of a model, as rank 0 sees them: processes that load their slice of the weights
and replay its steps, over memory that all of them map."""

from __future__ import annotations

import itertools
import logging
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmi_core.errors import EngineError
from lmi_core.runners.cpu.cpu_model import open_group
from lmi_core.runners.cpu.rank_hosts import HOST_GONE, HostedProcess
from lmi_core.sandbox import message

if TYPE_CHECKING:
    from lmi_core import _native
    from lmi_core.models.smoothing import Smoothing
    from lmi_core.models.spec import DecoderSpec
    from lmi_core.runners.step_memory import StepSizes
    from lmi_core.settings.engine_config import EngineConfig
    from lmi_core.settings.job import Job

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 1 << 30
_ROOT = Path(__file__).parents[3]
_BOOT = (
    "import importlib, sys; sys.path.append(sys.argv[1]); "
    "sys.exit(importlib.import_module(sys.argv[3]).main(int(sys.argv[2])))"
)
_MAIN = "lmi_core.runners.cpu.rank_process"
_END_TIMEOUT_S = 5.0


class Ranks:
    """From their start to their end; they end with this process, whatever ends it."""

    def __init__(self, config: EngineConfig, smoothing: Smoothing | None = None) -> None:
        """Start the processes, which load their weights at once; ``smoothing``: of a model that is
        quantised so."""
        self._config = config
        self._group: _native.RankGroup | None = None
        self._is_closing = False
        self._processes: list[RankProcess] = []
        self._ordering = threading.Lock()
        try:
            for rank in range(1, config.tensor_parallel_degree):
                self._processes.append(RankProcess(rank, config.job))
            for process in self._processes:
                own = replace(config, speculation=None)  # rank 0 drafts alone
                level = logging.getLogger().level
                process.send(("load", own, smoothing, process.rank, level))
        except BaseException:
            self.close()
            raise

    @property
    def num_ranks(self) -> int:
        """With rank 0."""
        return self._config.tensor_parallel_degree

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    @property
    def is_lost(self) -> bool:
        return self._group is not None and self._group.is_lost

    def join(self, spec: DecoderSpec, sizes: StepSizes, num_blocks: int) -> _native.RankGroup:
        """Return the group when all have their weights, caches and graphs. Raises what kept one of
        them from it, EngineError where one ended without a word."""
        self._group = open_group(self._config, sizes, spec)
        for process in self._processes:
            process.receive()
        for process in self._processes:
            process.send(("join", num_blocks))
            process.send_descriptor(self._group.descriptor)
        for process in self._processes:
            process.receive()
            process.is_loading = False
        for process in self._processes:
            threading.Thread(
                target=self._watch, args=(process,), name=f"rank-{process.rank}", daemon=True
            ).start()
        return self._group

    def order(self, name: str, *arguments: Any) -> list[Future[Any]]:
        """Have each other rank do something of ``RankOrders`` before steps that are submitted from
        now on; what it returns. Does not wait. In any thread."""
        return self.order_each(name, [arguments] * len(self._processes))

    def order_each(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Future[Any]]:
        """As ``order``, each rank with arguments of its own."""
        assert self._group is not None
        with self._ordering:
            self._group.add_order()
            return [
                process.call("order", name, own)
                for process, own in zip(self._processes, arguments, strict=True)
            ]

    def ask(self, name: str, *arguments: Any) -> list[Future[Any]]:
        """As ``order``, but of what steps don't wait for."""
        with self._ordering:
            return [process.call("ask", name, arguments) for process in self._processes]

    def close(self) -> None:
        """Let them end by themselves, in time. No step may be in flight. Idempotent."""
        self._is_closing = True
        for process in self._processes:
            process.settle()
        if self._group is not None:
            self._group.close()
        for process in self._processes:
            process.end()

    def _watch(self, process: RankProcess) -> None:
        assert self._group is not None
        process.listen()
        words = process.last_words()
        if not self._is_closing:
            why = f"rank {process.rank} of {self._config.tensor_parallel_degree} ended ({words})"
            log.error("%s: the model's steps fail from now on", why)
            self._group.lose(why)


class RankProcess:
    """One process, of this one or of a job's."""

    def __init__(self, rank: int, job: Job | None = None, main: str = _MAIN) -> None:
        """``main``: the module whose function of that name is its program, of this one's."""
        self.rank = rank
        self.is_loading = True
        self._numbers = itertools.count()
        self._calls: dict[int, Future[Any]] = {}
        self._unsent: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._held: deque[tuple[Any, ...]] = deque()
        self._sending = threading.Lock()
        self._is_gone = False
        self._connection, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = _started(rank, job, main, theirs.fileno())
            except BaseException:
                self._connection.close()
                raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, *values: Any) -> None:
        """Blocking; calls that are held go before. Raises EngineError where it is gone."""
        try:
            with self._sending:
                while self._held:
                    message.send(self._connection, message.encode(self._held.popleft()))
                for value in values:
                    message.send(self._connection, message.encode(value))
        except OSError:
            raise self._gone() from None

    def call(
        self, kind: str, name: str, arguments: tuple[Any, ...], *, is_held: bool = False
    ) -> Future[Any]:
        """Have ``listen`` send it, in the order of calls, and settle what is returned; ``is_held``:
        have ``send`` do it, before what it sends next. Does not wait."""
        number, call = next(self._numbers), Future[Any]()
        self._calls[number] = call
        unsent = self._held.append if is_held else self._unsent.put
        unsent((kind, number, name, arguments))
        if self._is_gone:
            self._fail_calls()
        return call

    def listen(self) -> None:
        """Send and settle calls until it is gone."""
        sender = threading.Thread(target=self._send_calls, name=f"to-rank-{self.rank}", daemon=True)
        sender.start()
        with suppress(EOFError, OSError):
            while True:
                kind, number, *result = message.decode(
                    message.receive(self._connection, MAX_MESSAGE_BYTES)
                )
                call = self._calls.pop(number)
                if kind == "failed":
                    call.set_exception(message.rebuilt(*result[0]))
                else:
                    call.set_result(result[0])
        self._is_gone = True
        self._fail_calls()
        self._unsent.put(None)
        sender.join()

    def _send_calls(self) -> None:
        with suppress(OSError):  # the rank may be gone
            while (call := self._unsent.get()) is not None:
                message.send(self._connection, message.encode(call))

    def _fail_calls(self) -> None:
        for number in list(self._calls):
            if (call := self._calls.pop(number, None)) is not None:
                call.set_exception(EngineError(f"rank {self.rank} ended"))

    def send_descriptor(self, descriptor: int) -> None:
        socket.send_fds(self._connection, [b"\0"], [descriptor])

    def receive(self) -> list[Any]:
        """Wait until it has done what it was told; what it says of that."""
        try:
            parts = message.receive(self._connection, MAX_MESSAGE_BYTES)
        except (EOFError, OSError):
            raise self._gone() from None
        kind, *rest = message.decode(parts)
        if kind == "failed":
            raise message.rebuilt(*rest[0])
        return list(rest)

    def last_words(self) -> str:
        code = self._process.wait()
        if code == HOST_GONE:
            return "with the process of the job that it ran in"
        return f"exit status {code}" if code >= 0 else f"signal {-code}"

    def kill(self) -> None:
        self._process.kill()

    def settle(self) -> None:
        """Let calls come to their end, in time."""
        wait(list(self._calls.values()), _END_TIMEOUT_S)

    def end(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # it wakes who listens
        self._connection.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _gone(self) -> EngineError:
        words = self.last_words()
        when = " while it loaded the model" if self.is_loading else ""
        why = f"rank {self.rank} ended{when} ({words})"
        if words == f"signal {signal.SIGKILL:d}":
            why += ": the kernel does that where memory runs out; dmesg says it"
        return EngineError(why)


def _started(
    rank: int, job: Job | None, main: str, descriptor: int
) -> subprocess.Popen[bytes] | HostedProcess:
    if job is not None:
        return HostedProcess(job, rank, descriptor)
    return subprocess.Popen(
        [sys.executable, "-c", _BOOT, str(_ROOT), str(descriptor), main],
        pass_fds=(descriptor,),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
