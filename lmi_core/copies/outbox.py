"""What a copy's engine hands out, gathered until the end of its step and sent as one message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any, NamedTuple

from lmi_core.engine.outputs import FinishReason, TokenEvent
from lmi_core.engine.stats import EngineObserver, RequestRecord, StepRecord, observe
from lmi_core.engine.stream import EventStream
from lmi_core.sandbox import message

_FIELDS = tuple(field.name for field in fields(TokenEvent) if field.name != "request_id")
_values = attrgetter(*_FIELDS)

PlainEvent = tuple[int, int, int, str, int, bool]
"""Of a token in the middle of a text: the request's number, then choice, token_id, text,
num_generated_tokens, special; the rest is as with the token before it."""
FullEvent = tuple[int, tuple[Any, ...]]
"""The request's number and every other field of the event."""


class Batch(NamedTuple):
    """What a step brought, in order."""

    events: list[PlainEvent | FullEvent]
    ends: list[tuple[int, tuple[Any, ...] | None]]
    """Requests that ended, after their events, and the parts of the error that ended them."""
    observed: list[tuple[str, tuple[Any, ...]]]
    """Calls of an ``EngineObserver``."""


class Outbox:
    """Collects for one turn of the event loop; is told by streams and observer that there is
    something."""

    def __init__(self, send: Callable[[Batch], None]) -> None:
        self._send = send
        self._batch = Batch([], [], [])
        self._is_due = False

    def put(self, number: int, event: TokenEvent) -> None:
        batch = self._batch
        if (
            event.finish_reason is not None
            or event.num_generated_tokens < 2
            or event.logprob is not None
        ):
            batch.events.append((number, _values(event)))
            return
        token_id, text = event.token_id, event.text
        num_generated = event.num_generated_tokens
        batch.events.append((number, event.choice, token_id, text, num_generated, event.special))

    def end(self, number: int, error: Exception | None) -> None:
        self._batch.ends.append((number, None if error is None else message.portable(error)))

    def observe(self, method: str, *arguments: Any) -> None:
        self._batch.observed.append((method, arguments))

    def wake(self) -> None:
        """Send at the loop's next turn, when the step's events are all there."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Send what there is."""
        self._is_due = False
        batch, self._batch = self._batch, Batch([], [], [])
        self._send(batch)


class CopyStream(EventStream):
    """A request's events on their way into the outbox."""

    __slots__ = ("_number", "_outbox")

    def __init__(self, number: int, outbox: Outbox) -> None:
        super().__init__(outbox.wake)
        self._number = number
        self._outbox = outbox

    def put(self, event: TokenEvent) -> None:
        self._outbox.put(self._number, event)

    def finish(self, error: Exception | None = None) -> None:
        if not self._is_finished:
            self._is_finished = True
            self._outbox.end(self._number, error)


class SentObserver:
    """An ``EngineObserver`` whose calls are made again at the other end."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def on_step(self, step: StepRecord) -> None:
        self._outbox.observe("on_step", step)
        self._outbox.wake()

    def on_first_token(self, seconds: float) -> None:
        self._outbox.observe("on_first_token", seconds)

    def on_token_intervals(self, seconds: list[float]) -> None:
        if seconds:
            self._outbox.observe("on_token_intervals", seconds)

    def on_request(self, record: RequestRecord) -> None:
        self._outbox.observe("on_request", record)

    def on_finish(self, reason: FinishReason | None) -> None:
        self._outbox.observe("on_finish", reason)


def observe_again(observer: EngineObserver, batch: Batch) -> None:
    for method, arguments in batch.observed:
        observe(getattr(observer, method), *arguments)


def full_event(request_id: str, values: tuple[Any, ...]) -> TokenEvent:
    """The event that ``FullEvent`` was made of."""
    return TokenEvent(request_id=request_id, **dict(zip(_FIELDS, values, strict=True)))
