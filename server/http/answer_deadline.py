"""Time limits of an answer: for its first events, and between two of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from lmi_core.errors import EngineError
from lmi_server.http.metrics import RequestMeter


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """In seconds; None: any time."""

    first_s: float | None = None
    next_s: float | None = None
    """Between two events, once there are any."""


class AnswerDeadline:
    """Ends what runs within it with EngineError once ``meter`` has seen no events for too long."""

    def __init__(self, meter: RequestMeter, limits: AnswerLimits) -> None:
        self._meter = meter
        self._limits = limits
        self._wait_s = limits.next_s if meter.num_generated_tokens else limits.first_s

    async def __aenter__(self) -> Self:
        self._timeout = asyncio.timeout(self._wait_s)
        await self._timeout.__aenter__()
        if self._limits != AnswerLimits():
            self._meter.on_events = self._note
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._meter.on_events = None
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise EngineError(
                f"no token came within {self._wait_s:g} s (chunked_read_timeout, "
                "option.predict_timeout)"
            ) from None

    def _note(self) -> None:
        self._wait_s = self._limits.next_s
        now = asyncio.get_running_loop().time()
        self._timeout.reschedule(None if self._wait_s is None else now + self._wait_s)
