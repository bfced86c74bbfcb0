"""The way of a request's events from the engine's loop to whoever reads them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol, runtime_checkable

from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.request import GenerationRequest

_log = logging.getLogger(__name__)


class EventStream:
    """Events put by the engine's loop and taken by one reader, in the same thread or another.

    The reader is notified once per step; one that is slow takes several steps' events at once.
    """

    __slots__ = ("_error", "_events", "_is_finished", "_notify", "abort", "prompt_ids")

    def __init__(self, notify: Callable[[], None]) -> None:
        """``notify`` tells the reader that there is something to take; it may do so in vain. One
        that raises isn't called again, and its request is ended."""
        self._notify = notify
        self.abort: Callable[[EventStream], None] | None = None
        """Ends the request, once it is open."""
        self.prompt_ids: Sequence[int] = ()
        """Its prompt's tokens, once it is open."""
        self._events: deque[TokenEvent] = deque()
        self._is_finished = False
        self._error: Exception | None = None

    def put(self, event: TokenEvent) -> None:
        """Add an event; the reader learns of it by the next ``notify``."""
        self._events.append(event)

    def finish(self, error: Exception | None = None) -> None:
        """Nothing follows; ``error`` is raised at the reader after the events before it."""
        if not self._is_finished:
            self._error = error
            self._is_finished = True

    def notify(self) -> None:
        """Tell the reader, whose mistakes don't end the engine's loop."""
        try:
            self._notify()
        except Exception:
            _log.exception("a reader's notify failed; its request is ended")
            self._notify = _nothing
            asyncio.get_running_loop().call_soon(self.close)

    def close(self) -> None:
        """The reader wants no more: ends the request, unless it has ended."""
        if self.abort is not None:
            self.abort(self)

    def take(self) -> tuple[list[TokenEvent], bool]:
        """Everything that is there, and whether nothing follows. Raises the stream's error, by a
        call of its own when there are events before it: the reader is notified again for that.
        """
        # Read first: the other thread may put the last events after the queue looked empty.
        is_finished = self._is_finished
        events = []
        while self._events:
            events.append(self._events.popleft())
        if not is_finished or self._error is None:
            return events, is_finished
        if not events:
            raise self._error
        self.notify()
        return events, False


def _nothing() -> None:
    """What is done for a reader that can't be told."""


@runtime_checkable
class Subscribable(Protocol):
    """What takes requests and hands over their events without waking a task for them."""

    async def subscribe(
        self, request: GenerationRequest, notify: Callable[[], None]
    ) -> EventStream:
        """``notify`` is called in the caller's event loop when there are events to take; closing
        the stream aborts the request. Raises as ``Engine.generate``."""
        ...


async def batches(
    source: Subscribable, request: GenerationRequest, *, says_taken: bool = False
) -> AsyncGenerator[list[TokenEvent], None]:
    """A request's events in lists of all that are ready; closing the generator aborts it.
    ``says_taken``: an empty list comes first, once the request isn't refused any more."""
    ready = asyncio.Event()
    stream = await source.subscribe(request, ready.set)
    try:
        if says_taken:
            yield []
        is_finished = False
        while not is_finished:
            await ready.wait()
            ready.clear()
            events, is_finished = stream.take()
            if events:
                yield events
    finally:
        stream.close()
