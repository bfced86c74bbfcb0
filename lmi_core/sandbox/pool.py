"""A few children, started when there is work for them and ended when there is none for a while."""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from lmi_core.errors import CapacityError, UserError
from lmi_core.sandbox import message
from lmi_core.sandbox.process import Ended, Process

T = TypeVar("T")

NUM_CHILDREN = 2
_MAX_WAITING = 64
_IDLE_S = 60.0


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
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._idle: list[Process] = []
        self._timer: threading.Timer | None = None
        self._num_waiting = 0

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    async def run(
        self,
        function: Callable[..., T],
        *arguments: Any,
        limits: Limits,
        known: Any = None,
        stand_in: Any = None,
    ) -> T:
        """The function's result, or what it raised. In the child ``stand_in`` is in the place of
        the object ``known``, wherever function and arguments, which are pickled, have it.

        Raises UserError when a limit is exceeded, CapacityError when too many calls wait.
        """
        if self._num_waiting >= _MAX_WAITING:
            raise CapacityError(
                f"{self._num_waiting} large requests are being read, which is the limit; retry "
                "later, or send smaller ones",
                retry_after_s=5.0,
            )
        call = _Call(self, (function, arguments), limits, known, stand_in)
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call.run)
        except asyncio.CancelledError:
            call.cancel()
            raise
        finally:
            self._num_waiting -= 1

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
        self, pool: SandboxPool, call: message.Call, limits: Limits, known: Any, stand_in: Any
    ) -> None:
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

    def cancel(self) -> None:
        """Nobody waits for the result."""
        self._is_cancelled = True
        process = self._process
        if process is not None:
            process.kill()

    def run(self) -> Any:
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
