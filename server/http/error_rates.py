"""Health by the number of failures in a window of time (DJL-Serving's ConfigManager.java)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

from lmi_core.errors import CapacityError, EngineError, UserError
from lmi_server.dialects.base import HttpError

Limit = tuple[int, float]
"""Failures, and the seconds in which so many are too many."""


class ErrorRates:
    """Counts failures by kind: ``wlm`` (a full or closed queue), ``model`` (the engine failed a
    request), ``server`` (anything else unexpected) and ``any``. Mistakes of clients don't count,
    and neither does what fails after its answer has begun.
    """

    def __init__(self, limits: Mapping[str, Limit]) -> None:
        """``limits``: by kind; kinds without one aren't watched."""
        self._limits = dict(limits)
        self._failures: dict[str, deque[float]] = {kind: deque() for kind in limits}
        self.exceeded: str | None = None
        """The first kind that was over its limit; it stays so."""

    def count(self, error: Exception, now_s: float | None = None) -> None:
        """Take note of a request's failure; ``now_s``: by ``time.monotonic``."""
        kind = _kind(error)
        if not self._limits or kind is None:
            return
        now_s = time.monotonic() if now_s is None else now_s
        for name in (kind, "any"):
            if name in self._limits:
                self._add(name, now_s)

    def count_full(self) -> None:
        """As ``count``, of a request that there was no place for."""
        if self._limits:
            self.count(CapacityError(""))

    def _add(self, name: str, now_s: float) -> None:
        num_failures, window_s = self._limits[name]
        failures = self._failures[name]
        failures.append(now_s)
        while failures[0] < now_s - window_s:
            failures.popleft()
        if len(failures) > num_failures and self.exceeded is None:
            self.exceeded = name


def _kind(error: Exception) -> str | None:
    match error:
        case CapacityError():
            return "wlm"
        case HttpError() if error.kind.startswith("Wlm"):
            return "wlm"
        case HttpError():
            return "server" if error.status >= 500 else None
        case EngineError():
            return "model"
        case UserError():
            return None
        case _:
            return None if getattr(error, "status", 500) < 500 else "server"
