"""When readers are told of events: at once, but for many readers of very short steps."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from lmi_core.engine import delivery
from lmi_core.engine.delivery import LATEST_S, MANY_READERS, MOST_AT_ONCE, Delivery
from lmi_core.engine.stats import EngineTotals, NullObserver
from lmi_core.engine.stream import EventStream


class Readers:
    """Streams whose readers note that they were told."""

    def __init__(self, count: int) -> None:
        self.told: list[int] = []
        self.streams = [EventStream(partial(self.told_of, i)) for i in range(count)]

    def told_of(self, i: int) -> None:
        self.told.append(i)

    def take(self) -> list[int]:
        told, self.told = self.told, []
        return told


def new_delivery() -> Delivery:
    """Without scheduler and tokens: what it tells needs none."""
    nothing: Any = SimpleNamespace(special_ids=frozenset())
    return Delivery(nothing, nothing, EngineTotals(), NullObserver(), vocab_size=0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(delivery, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


def test_a_few_readers_are_told_of_every_step(clock: SimpleNamespace) -> None:
    readers = Readers(MANY_READERS - 1)
    teller = new_delivery()
    for _ in range(3):  # no time goes by, and there is no event loop that could wake anybody
        teller.tell(readers.streams, at_once=False)
        assert readers.take() == list(range(MANY_READERS - 1))


def test_many_are_told_of_several_short_steps_together(clock: SimpleNamespace) -> None:
    readers = Readers(MANY_READERS + 2)
    everybody = list(range(MANY_READERS + 2))

    async def main() -> None:
        teller = new_delivery()
        teller.tell(readers.streams, at_once=False)
        assert readers.take() == everybody
        clock.now_s += 0.4 * LATEST_S
        teller.tell(readers.streams[2:], at_once=False)
        clock.now_s += 0.4 * LATEST_S
        teller.tell(readers.streams[:-2], at_once=False)
        assert readers.take() == []
        clock.now_s += 0.4 * LATEST_S
        teller.tell(readers.streams, at_once=False)
        assert sorted(readers.take()) == everybody
        clock.now_s += 1.1 * LATEST_S
        teller.tell(readers.streams, at_once=False)
        assert readers.take() == everybody

    asyncio.run(main())


def test_a_first_token_does_not_wait(clock: SimpleNamespace) -> None:
    readers = Readers(MANY_READERS)

    async def main() -> None:
        teller = new_delivery()
        for _ in range(3):
            teller.tell(readers.streams, at_once=True)
            assert len(readers.take()) == MANY_READERS

    asyncio.run(main())


def test_who_waits_is_told_though_no_other_step_ends() -> None:
    readers = Readers(MANY_READERS)

    async def main() -> None:
        told = asyncio.Event()
        readers.streams[-1] = EventStream(told.set)
        teller = new_delivery()
        teller.tell(readers.streams, at_once=False)
        readers.take()
        told.clear()
        teller.tell(readers.streams, at_once=False)
        async with asyncio.timeout(5):
            await told.wait()
        assert len(readers.take()) == MANY_READERS - 1

    asyncio.run(main())


def test_very_many_are_told_in_several_turns(clock: SimpleNamespace) -> None:
    readers = Readers(2 * MOST_AT_ONCE + 1)

    async def main() -> None:
        new_delivery().tell(readers.streams, at_once=True)
        told = [readers.take()]
        while told[-1]:
            await asyncio.sleep(0)
            told.append(readers.take())
        assert [len(each) for each in told] == [MOST_AT_ONCE, MOST_AT_ONCE, 1, 0]
        assert [i for each in told for i in each] == list(range(len(readers.streams)))

    asyncio.run(main())
