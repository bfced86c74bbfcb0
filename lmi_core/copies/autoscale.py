"""How many copies the load asks for: a state machine without input or clock, and who asks it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from lmi_core.errors import EngineError, InsufficientMemoryError, TooManyCopiesError

log = logging.getLogger(__name__)

_NO_ROOM = (InsufficientMemoryError, TooManyCopiesError)
RISE_S = 3.0
"""More copies are started when they have been needed for so long."""
LOOK_S = 1.0
IDLE_S = 60.0
"""As LMI's max_idle_time."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What open requests take, and what a copy has: sequences, and tokens of their KV caches."""

    num_seqs: int
    num_tokens: int
    """Of prompts, and those expected of outputs."""
    seqs_of_copy: int
    tokens_of_copy: int

    @property
    def num_copies(self) -> int:
        """So many have room for all of it."""
        by_seqs = -(-self.num_seqs // max(1, self.seqs_of_copy))
        return max(by_seqs, -(-self.num_tokens // max(1, self.tokens_of_copy)))


class Autoscaler:
    """Between ``least`` and ``most`` copies: more once they have been needed for ``RISE_S``, fewer
    once they haven't been for ``idle_s``; by as many as were needed, or not, all of that time."""

    def __init__(self, least: int, most: int, idle_s: float) -> None:
        self.least, self.most = least, most
        self.num_wanted = least
        self._idle_s = idle_s
        self._since_s: float | None = None
        """Since when another number has been needed, all that time more or all that time fewer."""
        self._nearest = least
        """To ``num_wanted``, of those that were needed since."""

    def set_bounds(self, least: int, most: int, num_needed: int) -> int:
        """How many there are to be from now on, where ``num_needed`` are needed."""
        self.least, self.most = least, most
        return self.start_from(self._bounded(num_needed))

    def start_from(self, num_copies: int) -> int:
        """There are so many, whatever was wanted before."""
        self.num_wanted, self._since_s = num_copies, None
        return num_copies

    def note(self, num_needed: int, now_s: float) -> int:
        """How many there are to be, where ``num_needed`` are needed now."""
        num_needed = self._bounded(num_needed)
        rises = num_needed > self.num_wanted
        if num_needed == self.num_wanted:
            self._since_s = None
            return num_needed
        if self._since_s is None or rises != (self._nearest > self.num_wanted):
            self._since_s, self._nearest = now_s, num_needed
        self._nearest = (min if rises else max)(self._nearest, num_needed)
        if now_s - self._since_s >= (RISE_S if rises else self._idle_s):
            self.num_wanted, self._since_s = self._nearest, None
        return self.num_wanted

    def _bounded(self, num_needed: int) -> int:
        return min(self.most, max(self.least, num_needed))


class Autoscaling:
    """Looks at the demand once a second while there is any, or another number of copies than the
    fewest. One change comes after the other, be it asked for or by load: each starts from what is
    there when its turn comes."""

    def __init__(
        self,
        scaler: Autoscaler,
        demand: Callable[[], Demand],
        num_copies: Callable[[], int],
        scale: Callable[[int], Coroutine[Any, Any, None]],
    ) -> None:
        """``num_copies``: that are to be, without those that couldn't be started; ``scale``: has
        another number of them run; raises as ``Machines.claim`` where they don't fit, and all
        stays as it was."""
        self.scaler = scaler
        self._demand = demand
        self._num_copies = num_copies
        self._scale = scale
        self._timer: asyncio.TimerHandle | None = None
        self._turn = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()
        self._has_stopped = False

    async def set_bounds(self, least: int, most: int) -> None:
        """Have so many copies at least, and at most, from now on, also if the caller is cancelled
        meanwhile. Raises what ``scale`` raises where ``least`` can't be: all stays as it was."""
        await asyncio.shield(self._start(self._change_bounds(least, most)))

    def wake(self) -> None:
        """There is a request."""
        if self._timer is None and self.scaler.most > self.scaler.least and not self._has_stopped:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    async def stop(self) -> None:
        """Change nothing any more; returns when nothing is being changed. Idempotent."""
        self._has_stopped = True
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(*self._changes, return_exceptions=True)

    def _start(self, change: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changed)
        return task

    def _changed(self, task: asyncio.Task[None]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()  # it is seen: whoever asked for it has it, be it that they have left

    def _look(self) -> None:
        self._timer = None
        scaler, demand = self.scaler, self._demand()
        if not self._changes:
            before = self._num_copies()
            if before != scaler.num_wanted:  # others couldn't be started
                scaler.start_from(before)
            if scaler.note(demand.num_copies, time.monotonic()) != before:
                self._start(self._follow(demand))
        if demand.num_seqs or scaler.num_wanted != scaler.least:
            self.wake()

    async def _follow(self, demand: Demand) -> None:
        """Have as many copies as are wanted by load."""
        async with self._turn:
            scaler, before = self.scaler, self._num_copies()
            if self._has_stopped:
                return
            log.info(
                "%d copies instead of %d: %d sequences and %d tokens are open",
                *(scaler.num_wanted, before, demand.num_seqs, demand.num_tokens),
            )
            try:
                await self._change(scaler.num_wanted)
            except _NO_ROOM as error:
                log.warning("%d copies is the most from now on: %s", before, error)
                scaler.most = scaler.start_from(before)
            except Exception as error:  # what is read for it is gone, or a cluster
                log.error("there are still %d copies: %s", before, error)
                scaler.start_from(before)

    async def _change_bounds(self, least: int, most: int) -> None:
        async with self._turn:
            most, numbers = max(least, most), (self._demand().num_copies, self._num_copies())
            wanted, held = (min(most, max(least, number)) for number in numbers)
            try:
                await self._change(wanted)
            except _NO_ROOM as error:
                if held >= wanted:
                    raise
                await self._change(held)
                log.warning("%d copies is the most from now on: %s", held, error)
                wanted = most = held
            self.scaler.set_bounds(least, most, wanted)
        if wanted > least:
            self.wake()

    async def _change(self, num_copies: int) -> None:
        if self._has_stopped:
            raise EngineError("the copies are ending, there is no other number of them")
        if num_copies != self._num_copies():
            await self._scale(num_copies)
