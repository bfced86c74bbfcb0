"""Events that the engine's loop hands over itself, without waking a task for every step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.stream import EventStream, Subscribable
from lmi_server.http.frame_writer import FrameWriter

Feed = Callable[[list[TokenEvent]], bytes]


class PushedBatches:
    """A request's events: written by the engine's loop itself while their reader waits and the
    client keeps up, else the reader's. So a reader that waits sees what couldn't be written at
    once, the end, and errors."""

    def __init__(self, engine: Subscribable, request: GenerationRequest) -> None:
        self._engine = engine
        self._request = request
        self._stream: EventStream | None = None
        self._pushing: tuple[FrameWriter, Feed] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_finished = False
        self._error: Exception | None = None

    def push_to(self, writer: FrameWriter, feed: Feed) -> None:
        """From now on, write what ``feed`` makes of events (empty: nothing yet); what it raises is
        raised at the reader."""
        self._pushing = writer, feed

    async def batches(self) -> AsyncGenerator[list[TokenEvent], None]:
        """Those for the reader; closing it aborts the request, if that hasn't ended."""
        stream = self._stream = await self._engine.subscribe(self._request, self._notify)
        try:
            while self._error is None:
                if not self._is_finished:
                    events, self._is_finished = stream.take()
                    if events:
                        yield events
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
            self._pushing = None
            stream.close()

    def _notify(self) -> None:
        waiter, stream, pushing = self._waiter, self._stream, self._pushing
        if waiter is None or stream is None or waiter.done():
            return
        if pushing is not None and pushing[0].is_clear():
            writer, feed = pushing
            try:
                events, self._is_finished = stream.take()
                if events and (frame := feed(events)):
                    writer.push(frame)
                if not self._is_finished:
                    return
            except Exception as error:  # must not end the engine's loop
                self._error = error
        if not waiter.done():
            waiter.set_result(None)
