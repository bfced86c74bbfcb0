"""Frames that the engine's loop writes itself, without waking a task for every step."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence

from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.stream import EventStream, Subscribable
from lmi_server.dialects.base import Renderer
from lmi_server.http.frame_writer import FrameWriter
from lmi_server.http.metrics import RequestMeter
from lmi_server.http.portions import portions


class PushedFrames:
    """A request's events, rendered: written by the engine's loop itself while their reader waits
    and the client keeps up, else the reader's. So a reader that waits sees what couldn't be written
    at once, the end, errors, and so many events that others must have their turn between them."""

    def __init__(
        self,
        engine: Subscribable,
        request: GenerationRequest,
        renderer: Renderer,
        meter: RequestMeter,
    ) -> None:
        self._engine = engine
        self._request = request
        self._renderer = renderer
        self._meter = meter
        self._stream: EventStream | None = None
        self._writer: FrameWriter | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._left: deque[Sequence[TokenEvent]] = deque()
        self._is_finished = False
        self._error: Exception | None = None

    def push_to(self, writer: FrameWriter) -> None:
        """From now on, write there; what rendering raises is raised at the reader."""
        self._writer = writer

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Those for the reader (empty: nothing to say yet); closing it aborts the request, if that
        hasn't ended."""
        stream = self._stream = await self._engine.subscribe(self._request, self._notify)
        try:
            while self._left or self._error is None:
                if not (self._left or self._is_finished):
                    self._take(stream)
                if self._left:
                    yield self._rendered()
                    if self._left:
                        await asyncio.sleep(0)
                    continue
                if self._is_finished:
                    return
                self._waiter = asyncio.get_running_loop().create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
            raise self._error
        finally:
            self._writer = None
            stream.close()

    def _take(self, stream: EventStream) -> None:
        events, self._is_finished = stream.take()
        if len(events) == 1:
            self._left.append(events)
        else:
            self._left += [portion for [(_, portion)] in portions([(0, events)])]

    def _rendered(self) -> bytes:
        events = self._left.popleft()
        self._meter.observe(events)
        return self._renderer.feed(0, events)

    def _notify(self) -> None:
        waiter, stream, writer = self._waiter, self._stream, self._writer
        if waiter is None or stream is None or waiter.done():
            return
        if writer is not None and writer.is_clear():
            try:
                self._take(stream)
                if len(self._left) == 1 and (frame := self._rendered()):
                    writer.push(frame)
                if not (self._left or self._is_finished):
                    return
            except Exception as error:  # must not end the engine's loop
                self._error = error
        if not waiter.done():
            waiter.set_result(None)
