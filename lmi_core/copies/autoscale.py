"""How many copies the load asks for: a state machine without input or clock, and who asks it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from lmi_core.errors import InsufficientMemoryError

log = logging.getLogger(__name__)

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
        self.least, self.most, self._since_s = least, most, None
        self.num_wanted = self._bounded(num_needed)
        return self.num_wanted

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
    """Looks at the demand once a second while there is any, or more copies than the fewest."""

    def __init__(
        self,
        scaler: Autoscaler,
        demand: Callable[[], Demand],
        scale: Callable[[int], Coroutine[Any, Any, None]],
    ) -> None:
        """``scale``: has another number of copies run; raises InsufficientMemoryError."""
        self.scaler = scaler
        self._demand = demand
        self._scale = scale
        self._timer: asyncio.TimerHandle | None = None
        self._scaling: asyncio.Task[None] | None = None

    def set_bounds(self, least: int, most: int) -> int:
        """How many copies there are to be at once."""
        num_copies = self.scaler.set_bounds(least, most, self._demand().num_copies)
        if num_copies > least:
            self.wake()
        return num_copies

    def wake(self) -> None:
        """There is a request."""
        if self._timer is None and self.scaler.most > self.scaler.least:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._scaling is not None:
            self._scaling.cancel()

    def _look(self) -> None:
        self._timer = None
        scaler, demand = self.scaler, self._demand()
        before = scaler.num_wanted
        num_wanted = scaler.note(demand.num_copies, time.monotonic())
        if num_wanted != before:
            log.info(
                "%d copies instead of %d: %d sequences and %d tokens are open",
                *(num_wanted, before, demand.num_seqs, demand.num_tokens),
            )
            self._scaling = asyncio.create_task(self._change(num_wanted, before))
        if demand.num_seqs or num_wanted > scaler.least:
            self.wake()

    async def _change(self, num_wanted: int, before: int) -> None:
        try:
            await self._scale(num_wanted)
        except InsufficientMemoryError as error:
            log.warning("%d copies is the most from now on: %s", before, error)
            self.scaler.most = self.scaler.num_wanted = before
