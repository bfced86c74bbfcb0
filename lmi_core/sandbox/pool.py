"""A few children, started when there is work for them and ended when there is none for a while.

Clients share them: the next call is one of the client that has the fewest running, and neither one
client nor large calls together may have all the children.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from lmi_core.errors import CapacityError, UserError
from lmi_core.sandbox import message
from lmi_core.sandbox.process import Ended, Process

T = TypeVar("T")

NUM_CHILDREN = 2
_MAX_CALLS, _MAX_CALLS_OF_ONE = 64, 16
_MAX_BYTES = 1 << 30
_LARGE_BYTES = 8 << 20
_IDLE_S = 60.0

CLIENT: ContextVar[str | None] = ContextVar("client", default=None)
"""Whose call it is; None: of nobody who would have a share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a call may take; ``field`` and ``what`` name it in errors."""

    what: str
    field: str | None = None
    processor_s: int = 10
    memory_bytes: int = 1 << 30
    """Beyond what the child has when it gets the call."""
    result_bytes: int = 16 << 20

    @property
    def wall_s(self) -> float:
        """In case that the child sleeps, or the machine is busy."""
        return 10.0 * self.processor_s


class SandboxPool:
    """Runs functions of modules in children; one call each at a time, the others wait."""

    def __init__(self, num_children: int = NUM_CHILDREN, idle_s: float = _IDLE_S) -> None:
        self._threads = ThreadPoolExecutor(num_children, thread_name_prefix="lmi-sandbox")
        self._num_children = num_children
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._idle: list[Process] = []
        self._timer: threading.Timer | None = None
        self._waiting: list[_Call] = []
        self._running: list[_Call] = []

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    async def run(
        self,
        function: Callable[..., T],
        *arguments: Any,
        limits: Limits,
        num_bytes: int = 0,
        known: Any = None,
        stand_in: Any = None,
    ) -> T:
        """The function's result, or what it raised. In the child ``stand_in`` is in the place of
        the object ``known``, wherever function and arguments, which are pickled, have it.
        ``num_bytes``: about how large they are.

        Raises UserError when a limit is exceeded, CapacityError when too many calls wait.
        """
        call = _Call(self, (function, arguments), limits, num_bytes, known, stand_in)
        with self._lock:
            self._check_room(call)
            self._waiting.append(call)
        self._threads.submit(self._work)
        try:
            result: T = await asyncio.wrap_future(call.outcome)
            return result
        except asyncio.CancelledError:
            call.cancel()
            raise

    def _check_room(self, call: _Call) -> None:
        calls = [*self._waiting, *self._running]
        num_own = 0 if call.client is None else sum(one.client == call.client for one in calls)
        num_bytes = sum(one.num_bytes for one in calls)
        if num_own >= _MAX_CALLS_OF_ONE:
            reason = f"{num_own} large requests of this client are being read, which is its limit"
        elif len(calls) >= _MAX_CALLS:
            reason = f"{len(calls)} large requests are being read, which is the limit"
        elif calls and num_bytes + call.num_bytes > _MAX_BYTES:
            reason = f"large requests of {num_bytes >> 20} MiB are being read"
        else:
            return
        raise CapacityError(f"{reason}; retry later, or send smaller ones", retry_after_s=5.0)

    def _work(self) -> None:
        """Run calls until there is none that may run now."""
        while (call := self._next()) is not None:
            try:
                call.run()
            finally:
                with self._lock:
                    self._running.remove(call)

    def _next(self) -> _Call | None:
        with self._lock:
            num_running: Counter[str | None] = Counter(
                one.client for one in self._running if one.client is not None
            )
            num_large = sum(one.is_large for one in self._running)
            most = max(1, self._num_children - 1)
            may_run = [
                one
                for one in self._waiting
                if num_running[one.client] < most and not (one.is_large and num_large >= most)
            ]
            if not may_run:
                return None
            call = min(may_run, key=lambda one: num_running[one.client])  # the first of equals
            self._waiting.remove(call)
            self._running.append(call)
            if self._waiting:
                with suppress(RuntimeError):  # the interpreter ends
                    self._threads.submit(self._work)
            return call

    def take(self) -> Process:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_alive:
                    return process
                process.kill()
        return Process()

    def give_back(self, process: Process) -> None:
        """Keep it for a while."""
        with self._lock:
            self._idle.append(process)
            if self._timer is not None:
                self._timer.cancel()
            self._timer = threading.Timer(self._idle_s, self.close)
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        """End the children that have nothing to do."""
        with self._lock:
            processes, self._idle = self._idle, []
        for process in processes:
            process.kill()


class _Call:
    """One call, in a thread of the pool."""

    def __init__(
        self,
        pool: SandboxPool,
        call: message.Call,
        limits: Limits,
        num_bytes: int,
        known: Any,
        stand_in: Any,
    ) -> None:
        self.client = CLIENT.get()
        self.num_bytes = num_bytes
        self.outcome: Future[Any] = Future()
        self._pool = pool
        self._call = call
        self._limits = limits
        self._known = known
        self._head = {
            "processor_s": limits.processor_s,
            "memory_bytes": limits.memory_bytes,
            "known": stand_in,
        }
        self._process: Process | None = None
        self._is_cancelled = False

    @property
    def is_large(self) -> bool:
        return self.num_bytes > _LARGE_BYTES

    def cancel(self) -> None:
        """Nobody waits for the result."""
        self._is_cancelled = True
        process = self._process
        if process is not None:
            process.kill()

    def run(self) -> None:
        """Set the outcome; does nothing for a call that was cancelled before."""
        if not self.outcome.set_running_or_notify_cancel():
            return
        try:
            self.outcome.set_result(self._result())
        except BaseException as error:
            self.outcome.set_exception(error)

    def _result(self) -> Any:
        parts = message.encode(self._call, known=self._known)
        outcome, value, records = self._outcome(parts)
        for name, level, text in records:
            logging.getLogger(name).log(level, "%s", text)
        if outcome == "error":
            raise message.rebuilt(*value)
        if outcome == "memory":
            raise self._exceeded("more memory than it may")
        return value

    def _outcome(self, parts: list[bytes | memoryview]) -> Any:
        if self._is_cancelled:
            raise self._exceeded("too long for its client")
        process = self._process = self._pool.take()
        limits = self._limits
        if self._is_cancelled:  # while the child was started
            self._pool.give_back(process)
            raise self._exceeded("too long for its client")
        try:
            answer = process.call(
                self._head, parts, wall_s=limits.wall_s, max_bytes=limits.result_bytes
            )
        except Ended as end:
            if end.by_time:
                raise self._exceeded(
                    f"more than {limits.processor_s} s of processor time"
                ) from None
            raise self._exceeded("more memory than it may") from None
        except message.MessageTooLongError as error:
            process.kill()
            raise self._exceeded(f"too much room: {error}") from None
        except BaseException:
            process.kill()
            raise
        if process.is_last:
            process.kill()
        else:
            self._pool.give_back(process)
        return answer

    def _exceeded(self, amount: str) -> UserError:
        limits = self._limits
        return UserError(f"{limits.what} takes {amount}; make it smaller", field=limits.field)


_pool: SandboxPool | None = None


def shared_pool() -> SandboxPool:
    """The process's one pool."""
    global _pool
    if _pool is None:
        _pool = SandboxPool()
        atexit.register(_pool.close)
    return _pool
