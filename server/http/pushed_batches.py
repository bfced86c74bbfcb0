"""Events that the engine's loop hands over itself, without waking a task for every step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.stream import EventStream
from lmi_server.models.backend import Publisher


class Sink(Protocol):
    """Takes events at once, while it is ready."""

    def is_ready(self) -> bool: ...

    def take(self, events: list[TokenEvent]) -> None:
        """What it raises is raised at the reader."""


class PushedBatches(AsyncIterator[list[TokenEvent]]):
    """A request's events: to ``sink`` while the reader waits and the sink is ready, else to the
    reader. So a reader that waits sees what the sink couldn't take, the end, and errors."""

    def __init__(self, publisher: Publisher, request: GenerationRequest) -> None:
        self.sink: Sink | None = None
        self._publisher = publisher
        self._request = request
        self._stream: EventStream | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_finished = False
        self._error: Exception | None = None

    async def aclose(self) -> None:
        """Abort the request, if it hasn't ended."""
        self.sink = None
        if self._stream is not None:
            self._stream.close()

    async def __anext__(self) -> list[TokenEvent]:
        if self._stream is None:
            self._stream = await self._publisher.subscribe(self._request, self._notify)
        while True:
            if self._error is not None:
                raise self._error
            if not self._is_finished:
                events, self._is_finished = self._stream.take()
                if events:
                    return events
            if self._is_finished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _notify(self) -> None:
        waiter, stream, sink = self._waiter, self._stream, self.sink
        if waiter is None or stream is None or waiter.done():
            return
        if sink is not None and sink.is_ready():
            try:
                events, self._is_finished = stream.take()
                if events:
                    sink.take(events)
                if not self._is_finished:
                    return
            except Exception as error:  # must not end the engine's loop
                self._error = error
        if not waiter.done():
            waiter.set_result(None)
