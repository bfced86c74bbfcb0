"""Requests that may wait only so long for their first step."""

from __future__ import annotations

import heapq
import itertools

from lmi_core.engine.sequence import ActiveRequest
from lmi_core.errors import CapacityError


class Deadlines:
    """Has no clock: callers say what time it is, in the seconds of ``ActiveRequest.arrival_s``."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, ActiveRequest]] = []
        self._numbers = itertools.count()

    def add(self, request: ActiveRequest) -> None:
        if request.deadline_s is not None:
            heapq.heappush(self._heap, (request.deadline_s, next(self._numbers), request))

    def is_due(self, now_s: float) -> bool:
        """Whether ``take_due`` has any."""
        heap = self._heap
        while heap and not heap[0][2].is_waiting:
            heapq.heappop(heap)
        return bool(heap) and heap[0][0] <= now_s

    def take_due(self, now_s: float) -> list[ActiveRequest]:
        """Those that have waited to the end, each once."""
        due = []
        while self.is_due(now_s):
            due.append(heapq.heappop(self._heap)[2])
        return due


def waited_too_long(waited_s: float, most_s: float | None) -> CapacityError:
    """What a request ends with that nobody began in time."""
    return CapacityError(
        f"the request waited {waited_s:.3g} s for its turn, and may wait {most_s:g} "
        "(max_queue_s); retry later, or allow more",
        retry_after_s=1.0,
    )
