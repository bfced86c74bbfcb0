"""When readers are told that there are events for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from lmi_core.engine.sequence import ActiveRequest

MANY_READERS = 16
LATEST_S = 0.005


class Notices:
    """Tells the readers of each step's events, at once or with those of the next steps.

    Telling one has its frame made and sent, which costs more than all else that the loop does for a
    token, and the same for several tokens. So where a step has many readers, and they were told
    less than ``LATEST_S`` ago, which nobody sees, they wait until then; steps that take longer are
    told of at once.
    """

    def __init__(self) -> None:
        self._untold: dict[ActiveRequest, None] = {}
        self._told_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def give(self, requests: Iterable[ActiveRequest], *, at_once: bool) -> None:
        """A step has brought events of these, each once; ``at_once``: some can't wait."""
        untold = self._untold
        num_before = len(untold)
        untold.update(dict.fromkeys(requests))
        if not untold:
            return
        now_s = time.monotonic()
        left_s = self._told_s + LATEST_S - now_s
        if at_once or left_s <= 0 or len(untold) < MANY_READERS:
            self._tell()
        elif not num_before:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._tell)

    def _tell(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._told_s = time.monotonic()
        requests, self._untold = self._untold, {}
        for request in requests:
            request.stream.notify()
