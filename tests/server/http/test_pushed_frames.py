"""Events that are handed over by whoever makes them: written, or the reader's."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.stream import EventStream
from lmi_core.errors import EngineError
from lmi_server.http.frame_writer import FrameWriter
from lmi_server.http.metrics import RequestMeter
from lmi_server.http.pushed_frames import PushedFrames


class Publisher:
    """Publishes what the test tells it to."""

    def __init__(self) -> None:
        self.tell: Callable[[], None] = lambda: None
        self.stream = EventStream(lambda: self.tell())
        self.num_aborts = 0

    async def subscribe(
        self, request: GenerationRequest, notify: Callable[[], None]
    ) -> EventStream:
        self.tell = notify
        self.stream.abort = self._abort
        return self.stream

    def publish(self, *token_ids: int) -> None:
        for token_id in token_ids:
            self.stream.put(TokenEvent(request_id="r", choice=0, token_id=token_id, text=""))
        self.stream.notify()

    def finish(self, error: Exception | None = None) -> None:
        self.stream.finish(error)
        self.stream.notify()

    def _abort(self, stream: EventStream) -> None:
        assert stream is self.stream
        self.num_aborts += 1


class Client:
    """Renders frames of a byte for each token, and takes them while it is ready."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.is_ready = True
        self.error: Exception | None = None

    def is_clear(self) -> bool:
        return self.is_ready

    def push(self, frame: bytes) -> None:
        self.token_ids += frame

    def feed(self, index: int, events: list[TokenEvent]) -> bytes:
        if self.error is not None:
            raise self.error
        return bytes(event.token_id for event in events)


class Reading:
    """A task that reads all frames, past the first one with a client to write to."""

    def __init__(self) -> None:
        self.publisher = Publisher()
        self.client = Client()
        self.read: list[int] = []
        self.meter = RequestMeter("r")
        request, client = GenerationRequest(request_id="r", prompt="x"), cast(Any, self.client)
        self.pushed = PushedFrames(self.publisher, request, client, self.meter)
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async with aclosing(self.pushed.frames()) as frames:
            async for frame in frames:
                self.read += frame
                self.pushed.push_to(cast(Any, self.client))

    async def begin(self) -> None:
        """The first event goes to the reader, which then waits."""
        await settle()
        self.publisher.publish(0)
        await settle()
        assert self.read == [0]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(test: Callable[[Reading], Coroutine[None, None, None]]) -> None:
    async def main() -> None:
        reading = Reading()
        await reading.begin()
        await test(reading)

    asyncio.run(main())


def test_events_are_written_before_anybody_is_woken() -> None:
    async def check(reading: Reading) -> None:
        reading.publisher.publish(1, 2)
        assert reading.client.token_ids == [1, 2]
        reading.publisher.publish(3)
        assert reading.client.token_ids == [1, 2, 3]
        reading.publisher.finish()
        await reading.task
        assert reading.read == [0]
        assert reading.meter.num_generated_tokens == 4

    run(check)


def test_the_reader_gets_what_the_client_cannot_take() -> None:
    async def check(reading: Reading) -> None:
        reading.client.is_ready = False
        reading.publisher.publish(1)
        reading.client.is_ready = True
        reading.publisher.publish(2)  # the reader was woken and hasn't come yet: order is kept
        assert reading.client.token_ids == []
        await settle()
        assert reading.read == [0, 1, 2]
        reading.publisher.publish(3)
        assert reading.client.token_ids == [3]
        reading.publisher.finish()
        await reading.task

    run(check)


def test_many_events_are_the_readers_a_portion_at_a_time() -> None:
    """Of somebody whose connection was busy for long, in several turns of the loop."""

    async def check(reading: Reading) -> None:
        everything = [i % 200 for i in range(1, 5000)]
        reading.publisher.publish(*everything)
        assert reading.client.token_ids == []
        await asyncio.sleep(0)
        assert 0 < len(reading.read) < 2000
        reading.publisher.publish(201)  # comes behind them
        for _ in range(12):
            await asyncio.sleep(0)
        assert reading.read == [0, *everything, 201]
        reading.publisher.publish(202)
        assert reading.client.token_ids == [202]
        reading.publisher.stream.put(TokenEvent(request_id="r", choice=0, token_id=203, text=""))
        reading.publisher.finish(EngineError("the step failed"))
        with pytest.raises(EngineError, match="the step failed"):
            await reading.task
        assert reading.client.token_ids == [202, 203]

    run(check)


def test_an_error_comes_after_the_events_before_it() -> None:
    async def check(reading: Reading) -> None:
        reading.publisher.stream.put(TokenEvent(request_id="r", choice=0, token_id=1, text=""))
        reading.publisher.finish(EngineError("the step failed"))
        assert reading.client.token_ids == [1]
        with pytest.raises(EngineError, match="the step failed"):
            await reading.task

    run(check)


def test_what_rendering_raises_is_the_readers() -> None:
    async def check(reading: Reading) -> None:
        reading.client.error = ZeroDivisionError("no")
        reading.publisher.publish(1)
        with pytest.raises(ZeroDivisionError):
            await reading.task

    run(check)


def test_a_reader_that_goes_aborts_and_nothing_is_written_any_more() -> None:
    async def check(reading: Reading) -> None:
        reading.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading.task
        assert reading.publisher.num_aborts == 1
        reading.publisher.publish(1)
        assert reading.client.token_ids == []

    run(check)


def test_nothing_is_pushed_to_a_client_that_has_left() -> None:
    """Several steps can be handed over before its connection's end is noticed."""

    async def main() -> None:
        ours, theirs = socket.socketpair()
        transport, _ = await asyncio.get_running_loop().create_connection(
            asyncio.Protocol, sock=ours
        )
        chunked = SimpleNamespace(headers={"Transfer-Encoding": "chunked"})
        asked = SimpleNamespace(transport=transport)
        writer = FrameWriter(cast(Any, asked), cast(Any, chunked), timeout_s=9)
        assert writer.is_clear()
        theirs.close()
        writer.push(b"x")
        writer.push(b"x")  # finds that out
        assert transport.is_closing()
        assert not writer.is_clear()
        await asyncio.sleep(0)

    asyncio.run(main())
