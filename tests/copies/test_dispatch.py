"""Requests over copies that are played here: each gets all of its events, and one end."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from lmi_core.copies.dispatch import MAX_LOSSES, Dispatch
from lmi_core.copies.open_request import OpenRequest
from lmi_core.copies.outbox import Batch, CopyStream, Outbox, full_event
from lmi_core.copies.router import Entry
from lmi_core.engine.handover import Handover
from lmi_core.engine.outputs import FinishReason, TokenEvent
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.stream import EventStream
from lmi_core.errors import CapacityError, EngineError, UserError
from lmi_core.sandbox import message

LENGTH = 12


def token_at(number: int, choice: int, position: int) -> int:
    return (number * 31 + choice * 7 + position * 3) % 250


class PlayedCopy:
    """Gives tokens that follow from the request and the position alone."""

    def __init__(self, copy_id: int) -> None:
        self.copy_id = copy_id
        self.running: dict[int, list[list[int] | None]] = {}
        self.unread: set[int] = set()
        self.aborted: list[int] = []
        self.unpinned: list[str] = []

    def unpin(self, session: str) -> None:
        self.unpinned.append(session)

    def open(self, number: int, request: GenerationRequest, handover: Handover) -> None:
        outputs = [list(output) for output in handover.outputs] or [
            [] for _ in range(request.params.n)
        ]
        self.running[number] = [
            None if choice in handover.finished else output for choice, output in enumerate(outputs)
        ]

    def abort(self, number: int) -> None:
        self.running.pop(number, None)
        self.aborted.append(number)

    def step(self) -> Batch:
        """A token of every choice that runs."""
        batches: list[Batch] = []
        outbox = Outbox(batches.append)
        for number, outputs in list(self.running.items()):
            stream = CopyStream(number, outbox)
            for choice, output in enumerate(outputs):
                if output is None:
                    continue
                output.append(token_at(number, choice, len(output)))
                is_last = len(output) == LENGTH
                stream.put(event_of(number, choice, output, is_last=is_last))
                if is_last:
                    outputs[choice] = None
            if not any(output is not None for output in outputs):
                del self.running[number]
                stream.finish()
        outbox.flush()
        [batch] = batches
        return batch


def event_of(number: int, choice: int, output: list[int], *, is_last: bool) -> TokenEvent:
    return TokenEvent(
        request_id=str(number),
        choice=choice,
        token_id=output[-1],
        text=f"{output[-1]} ",
        num_prompt_tokens=3,
        num_generated_tokens=len(output),
        finish_reason=FinishReason.LENGTH if is_last else None,
    )


class Reader:
    """A request and what was handed over of it."""

    def __init__(
        self, dispatch: Dispatch, number: int, n: int = 1, max_queue_s: float | None = None
    ) -> None:
        self.events: list[TokenEvent] = []
        self.num_ends = 0
        self.error: Exception | None = None
        self.stream = EventStream(self.take)
        self.request = OpenRequest(
            GenerationRequest(
                request_id=str(number),
                prompt_token_ids=(1, 2, 3),
                params=SamplingParams(n=n, seed=number),
                max_queue_s=max_queue_s,
            ),
            Entry(number, num_seqs=n, num_prompt_tokens=3, num_output_tokens=n * LENGTH),
            self.stream,
            arrival_s=time.monotonic(),
            prefix_seed=b"",
            hashes=[],
            num_first=-1,
            on_end=lambda: None,
        )
        dispatch.put(self.request)

    def take(self) -> None:
        try:
            events, is_finished = self.stream.take()
        except Exception as error:
            self.error = error
            is_finished, events = True, []
        self.events += events
        self.num_ends += is_finished

    def tokens(self, choice: int) -> list[int]:
        return [event.token_id for event in self.events if event.choice == choice]


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 30))


@pytest.mark.parametrize("seed", range(10))
def test_each_request_gets_its_tokens_and_one_end_whatever_copies_do(seed: int) -> None:
    async def main() -> None:
        chance = random.Random(seed)
        dispatch = Dispatch(4, None)
        copies: list[PlayedCopy] = []
        readers: list[Reader] = []
        lost: list[PlayedCopy] = []

        def add_copy() -> None:
            copies.append(PlayedCopy(len(copies) + len(lost)))
            dispatch.add_copy(copies[-1], room=chance.randint(1, 6), num_blocks=10)

        def lose_copy() -> None:
            # Its requests mustn't be taken for the reason, which they are after some losses.
            if copies and all(reader.request.num_losses < MAX_LOSSES - 1 for reader in readers):
                lost.append(copies.pop(chance.randrange(len(copies))))
                if chance.random() < 0.5:
                    lost[-1].step()  # what it didn't get to send
                dispatch.remove_copy(lost[-1])

        for _ in range(200):
            move = chance.random()
            if move < 0.2 and len(readers) < 30:
                readers.append(Reader(dispatch, len(readers), chance.choice((1, 1, 3))))
            elif move < 0.3 and len(copies) < 3:
                add_copy()
            elif move < 0.35:
                lose_copy()
            elif copies:
                dispatch.take(chance.choice(copies).step())
        add_copy()
        while len(dispatch):
            for copy in copies:
                dispatch.take(copy.step())
        assert len(readers) > 10
        for reader in readers:
            assert (reader.num_ends, reader.error) == (1, None)
            for choice in range(reader.request.request.params.n):
                number = reader.request.number
                assert reader.tokens(choice) == [token_at(number, choice, i) for i in range(LENGTH)]

    run(main())


def test_requests_wait_while_there_is_no_copy() -> None:
    async def main() -> None:
        dispatch = Dispatch(4, None)
        first, second = PlayedCopy(0), PlayedCopy(1)
        dispatch.add_copy(first, room=4, num_blocks=4)
        reader = Reader(dispatch, 7)
        dispatch.take(first.step())
        dispatch.remove_copy(first)
        assert dispatch.num_waiting == 1
        dispatch.add_copy(second, room=4, num_blocks=4)
        while len(dispatch):
            dispatch.take(second.step())
        assert reader.tokens(0) == [token_at(7, 0, i) for i in range(LENGTH)]
        assert (reader.num_ends, dispatch.num_resumed) == (1, 1)

    run(main())


def test_who_waits_for_a_copy_waits_no_longer_than_allowed() -> None:
    """Here as in an engine: of three, the copy has room for one, and one may wait for any time."""

    async def main() -> None:
        dispatch, copy = Dispatch(4, None), PlayedCopy(0)
        dispatch.add_copy(copy, room=1, num_blocks=4)
        runs, leaves, stays = (Reader(dispatch, i, 1, s) for i, s in enumerate((0.02, 0.02, None)))
        gone = Reader(dispatch, 3, 1, 0.02)
        dispatch.abort(gone.request)
        await asyncio.sleep(0.1)
        assert (runs.num_ends, stays.num_ends, gone.num_ends) == (0, 0, 1)
        assert isinstance(leaves.error, CapacityError)
        assert "may wait 0.02 (max_queue_s)" in str(leaves.error)
        while len(dispatch):
            dispatch.take(copy.step())
        assert [len(reader.tokens(0)) for reader in (runs, stays)] == [LENGTH, LENGTH]
        assert [reader.num_ends for reader in (runs, leaves, stays)] == [1, 1, 1]

    run(main())


def test_a_request_that_every_copy_ends_with_fails() -> None:
    async def main() -> None:
        dispatch = Dispatch(4, None)
        reader = Reader(dispatch, 0)
        for copy_id in range(MAX_LOSSES):
            assert reader.num_ends == 0
            copy = PlayedCopy(copy_id)
            dispatch.add_copy(copy, room=4, num_blocks=4)
            dispatch.remove_copy(copy)
        assert reader.num_ends == 1
        assert isinstance(reader.error, EngineError)
        assert len(dispatch) == 0

    run(main())


def test_a_request_is_not_the_reason_of_an_end_before_it_was_read() -> None:
    async def main() -> None:
        dispatch = Dispatch(4, None)
        reader = Reader(dispatch, 0)
        for copy_id in range(MAX_LOSSES + 1):
            copy = PlayedCopy(copy_id)
            dispatch.add_copy(copy, room=4, num_blocks=4)
            copy.unread = set(copy.running)
            dispatch.remove_copy(copy)
        assert (reader.num_ends, dispatch.num_waiting) == (0, 1)

    run(main())


def test_an_aborted_request_ends_once_and_leaves_its_copy() -> None:
    async def main() -> None:
        dispatch = Dispatch(4, None)
        copy = PlayedCopy(0)
        dispatch.add_copy(copy, room=4, num_blocks=4)
        reader = Reader(dispatch, 0, n=2)
        late = copy.step()
        dispatch.abort(reader.request)
        dispatch.abort(reader.request)
        dispatch.take(late)
        assert copy.aborted == [0]
        assert [event.finish_reason for event in reader.events] == [FinishReason.ABORT] * 2
        assert reader.num_ends == 1

    run(main())


def test_a_copy_that_is_to_go_finishes_what_it_has() -> None:
    async def main() -> None:
        dispatch = Dispatch(4, None)
        leaving, staying = PlayedCopy(0), PlayedCopy(1)
        dispatch.add_copy(leaving, room=4, num_blocks=4)
        reader = Reader(dispatch, 0)
        drained = asyncio.create_task(dispatch.drain_copy(leaving))
        await asyncio.sleep(0)
        dispatch.add_copy(staying, room=4, num_blocks=4)
        Reader(dispatch, 1)
        assert (list(leaving.running), list(staying.running)) == ([0], [1])
        while leaving.running:
            assert not drained.done()
            dispatch.take(leaving.step())
        await drained
        assert len(reader.tokens(0)) == LENGTH

    run(main())


def test_a_copy_that_is_to_stay_after_all_gets_requests_again() -> None:
    async def main() -> None:
        dispatch = Dispatch(4, None)
        copy = PlayedCopy(0)
        dispatch.add_copy(copy, room=4, num_blocks=4)
        Reader(dispatch, 0)
        drained = asyncio.create_task(dispatch.drain_copy(copy))
        await asyncio.sleep(0)
        waiting = Reader(dispatch, 1)
        assert list(copy.running) == [0]
        drained.cancel()
        await asyncio.wait([drained])
        assert list(copy.running) == [0, 1]
        while copy.running:
            dispatch.take(copy.step())
        assert len(waiting.tokens(0)) == LENGTH
        # One that is lost before it is drained has nothing to do.
        dispatch.remove_copy(copy)
        await dispatch.drain_copy(copy)

    run(main())


def test_events_and_errors_arrive_as_they_were() -> None:
    event = TokenEvent(request_id="a", choice=1, token_id=5, text="x", logprob=-0.5, stop="end")
    batches: list[Batch] = []

    async def main() -> None:
        outbox = Outbox(batches.append)
        outbox.put(3, event)
        outbox.end(3, UserError("no", field="prompt"))
        outbox.flush()

    run(main())
    [[(number, values)], [(_, parts)], _] = message.decode(_sent(batches[0]))
    assert (number, full_event("a", values)) == (3, event)
    error = message.rebuilt(*parts)
    assert isinstance(error, UserError)
    assert (str(error), error.field) == ("no", "prompt")


def test_an_error_that_cannot_be_sent_arrives_as_its_text() -> None:
    error = ValueError("odd")
    error.extra = lambda: None  # type: ignore[attr-defined]
    assert str(message.rebuilt(*message.portable(error))) == "ValueError: odd"


def _sent(value: Any) -> list[bytearray]:
    """A message's parts after a way in single bytes."""
    parts = message.encode(value)
    received = bytearray()
    for byte in b"".join((message.head(parts), *map(bytes, parts))):
        assert message.take(received) is None
        received.append(byte)
    taken = message.take(received)
    assert taken is not None
    assert not received
    return taken
