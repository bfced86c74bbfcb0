"""Watches an event loop for what holds it, or the interpreter's lock, for too long.

Everything is counted in processor time, so that a busy machine changes nothing: a turn of the loop
by the loop thread's own clock, a hold of the lock by how long a thread of the watchdog waited for
it without being ready to run, and at most the processor time that some thread spent meanwhile.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 0.05
_SHARES_CORES = "PYTEST_XDIST_WORKER" in os.environ or "CI" in os.environ
ALLOWANCE = 3 if _SHARES_CORES else 1
"""Caches and virtual processors that others use, too, make the same work take longer."""
_INTERVAL_S = 0.005
_RUN_DELAY = Path("/proc/thread-self/schedstat")


@dataclass(slots=True)
class Hold:
    """The longest of its kind, and where it was."""

    seconds: float = 0.0
    stack: str = ""

    def note(self, seconds: float, stack: str) -> None:
        if seconds > self.seconds:
            self.seconds, self.stack = seconds, stack


class Watchdog:
    """``turn``: the loop thread's processor time of one turn; ``lock``: one call's of the lock."""

    def __init__(self, loop: asyncio.AbstractEventLoop, thread_id: int) -> None:
        self.turn, self.lock = Hold(), Hold()
        self._loop = loop
        self._thread_id = thread_id
        self._clock = time.pthread_getcpuclockid(thread_id)
        self._started_s: float | None = None
        self._stack = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="watchdog", daemon=True)

    def start(self) -> None:
        run_once = self._loop._run_once  # type: ignore[attr-defined]

        def watched() -> None:
            self._stack = ""
            started_s = self._started_s = time.thread_time()
            try:
                run_once()
            finally:
                self._started_s = None
                self.turn.note(time.thread_time() - started_s, self._stack)

        self._loop._run_once = watched  # type: ignore[attr-defined]
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()
        del self._loop._run_once  # type: ignore[attr-defined]

    def check(self) -> None:
        """AssertionError with the stack of what took too long."""
        for what, hold in (("one turn of the loop", self.turn), ("one call's lock", self.lock)):
            assert hold.seconds <= ALLOWANCE * LIMIT_S, (
                f"{what} took {hold.seconds * 1000:.0f} ms of processor time, at most "
                f"{LIMIT_S * 1000:.0f} are allowed:\n{hold.stack}"
            )

    def _sample(self) -> None:
        while not self._ended.is_set():
            before = _processor_times()
            woke_s, delayed_s = time.monotonic(), _run_delay_s()
            time.sleep(_INTERVAL_S)
            waited_s = time.monotonic() - woke_s - _INTERVAL_S - (_run_delay_s() - delayed_s)
            if waited_s > _INTERVAL_S:
                spent_s, thread_id = max(
                    (spent - before.get(thread_id, 0.0), thread_id)
                    for thread_id, spent in _processor_times().items()
                )
                self.lock.note(min(waited_s, spent_s), _stack_of(thread_id))
            started_s = self._started_s
            if started_s is not None and time.clock_gettime(self._clock) - started_s > LIMIT_S / 2:
                self._stack = _stack_of(self._thread_id)


def _run_delay_s() -> float:
    """How long the calling thread has been ready to run, but wasn't run."""
    return int(_RUN_DELAY.read_text().split()[1]) * 1e-9


def _processor_times() -> dict[int, float]:
    own = threading.get_ident()
    times = {}
    for thread in threading.enumerate():
        if thread.ident not in (None, own) and thread.is_alive():
            try:
                times[thread.ident] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            except OSError:  # it has ended
                continue
    return times


def _stack_of(thread_id: int) -> str:
    """Read without making frame objects, which a thread that runs on may not survive."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = file.read().decode(errors="replace").split("\n\n")
    return next((stack for stack in stacks if f"0x{thread_id:016x}" in stack), "")


shares_process: ContextVar[bool] = ContextVar("shares_process", default=False)
"""Whether something beside the server works in its process, whose holds aren't the server's."""

longest: dict[str, Hold] = {"turn": Hold(), "lock": Hold()}
"""Of all loops that were watched; ``stack`` says which test it was."""


@contextmanager
def watched(name: str = "") -> Iterator[Watchdog]:
    """Watch the running loop; leaving without an error checks it."""
    gc.freeze()  # else collections would take as long as what other tests have left is large
    watchdog = Watchdog(asyncio.get_running_loop(), threading.get_ident())
    watchdog.start()
    try:
        yield watchdog
    finally:
        watchdog.stop()
        gc.unfreeze()
        if not shares_process.get():
            longest["turn"].note(watchdog.turn.seconds, name)
            longest["lock"].note(watchdog.lock.seconds, name)
    if not shares_process.get():
        watchdog.check()
