"""Numbers of copies that follow the load, second by second."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from lmi_core.copies import autoscale
from lmi_core.copies.autoscale import Autoscaler, Autoscaling, Demand
from lmi_core.errors import EngineError, InsufficientMemoryError, ModelError, TooManyCopiesError
from tests.engine.harness import until

IDLE = Demand(num_seqs=0, num_tokens=0, seqs_of_copy=8, tokens_of_copy=1000)


def wanted(scaler: Autoscaler, *needed: int) -> list[int]:
    """For each second's need."""
    start = getattr(scaler, "seconds", 0)
    scaler.seconds = start + len(needed)  # type: ignore[attr-defined]
    return [scaler.note(number, float(start + i)) for i, number in enumerate(needed)]


@pytest.mark.parametrize(
    ("num_seqs", "num_tokens", "expected"),
    [(0, 0, 0), (1, 1, 1), (8, 1000, 1), (9, 10, 2), (8, 1001, 2), (17, 5000, 5)],
)
def test_copies_have_room_for_sequences_and_for_their_tokens(
    num_seqs: int, num_tokens: int, expected: int
) -> None:
    demand = replace(IDLE, num_seqs=num_seqs, num_tokens=num_tokens)
    assert demand.num_copies == expected


def test_more_copies_come_when_they_are_needed_for_a_while() -> None:
    scaler = Autoscaler(1, 4, idle_s=10)
    assert wanted(scaler, 1, 3, 3, 1, 3, 3, 2, 4) == [1, 1, 1, 1, 1, 1, 1, 2]
    assert wanted(scaler, 9, 9, 9, 9, 9) == [2, 2, 2, 4, 4]


def test_copies_go_when_they_have_not_been_needed_for_long() -> None:
    scaler = Autoscaler(1, 4, idle_s=5)
    assert wanted(scaler, 4, 4, 4, 4)[-1] == 4
    assert wanted(scaler, 0, 2, 0, 0, 0, 0) == [4, 4, 4, 4, 4, 2]
    assert wanted(scaler, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0) == [2] * 9 + [1]
    assert wanted(scaler, 0, 0) == [1, 1]


def test_other_bounds_hold_at_once() -> None:
    scaler = Autoscaler(2, 4, idle_s=5)
    assert scaler.num_wanted == 2
    assert scaler.set_bounds(3, 6, 0) == 3
    assert scaler.set_bounds(1, 6, 5) == 5
    assert scaler.set_bounds(1, 1, 5) == 1
    assert wanted(scaler, 9, 9, 9, 9, 9) == [1] * 5


class Played:
    """Copies of which so many fit, and a demand."""

    def __init__(
        self,
        least: int,
        most: int,
        *,
        fit: int = 99,
        full: type[Exception] = InsufficientMemoryError,
    ) -> None:
        self.num_copies, self.fit, self.full = least, fit, full
        self.scaled: list[int] = []
        self.demand = IDLE
        self.num_looks = 0
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        scaler = Autoscaler(least, most, idle_s=0.05)
        self.scaling = Autoscaling(scaler, self.look, lambda: self.num_copies, self.scale)

    def look(self) -> Demand:
        self.num_looks += 1
        return self.demand

    def need(self, num_copies: int) -> None:
        self.demand = replace(IDLE, num_seqs=8 * num_copies)
        self.scaling.wake()

    async def scale(self, number: int) -> None:
        self.scaled.append(number)
        await self.may_go_on.wait()
        if number > self.fit:
            raise self.full("no room")
        self.num_copies = number

    @property
    def bounds(self) -> tuple[int, int, int]:
        scaler = self.scaling.scaler
        return scaler.least, scaler.most, scaler.num_wanted


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscale, "LOOK_S", 0.01)
    monkeypatch.setattr(autoscale, "RISE_S", 0.03)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("full", [InsufficientMemoryError, TooManyCopiesError])
def test_it_looks_while_there_is_load_and_stays_within_what_fits(full: type[Exception]) -> None:
    async def main() -> None:
        played = Played(1, 4, fit=2, full=full)
        played.need(3)
        await until(lambda: bool(played.scaled) and not played.scaling._changes)
        # What there is no room for isn't tried again.
        assert (played.scaled, played.bounds) == ([3], (1, 1, 1))
        await played.scaling.set_bounds(1, 2)
        assert (played.num_copies, played.bounds) == (2, (1, 2, 2))
        played.demand = IDLE
        await until(lambda: played.num_copies == 1)
        await asyncio.sleep(0.05)
        num_before = played.num_looks
        await asyncio.sleep(0.05)
        assert played.num_looks == num_before  # nothing wakes up where nothing runs
        await played.scaling.stop()

    asyncio.run(main())


@pytest.mark.usefixtures("fast")
def test_bounds_that_come_while_copies_are_started_by_load_hold() -> None:
    async def main() -> None:
        played = Played(1, 4)
        played.may_go_on.clear()
        played.need(4)
        await until(lambda: played.scaled == [4])
        caller = asyncio.create_task(played.scaling.set_bounds(1, 2))
        await asyncio.sleep(0.03)
        caller.cancel()  # a client that leaves doesn't leave half of it behind
        played.may_go_on.set()
        await until(lambda: played.num_copies == 2)
        assert (played.scaled, played.bounds) == ([4, 2], (1, 2, 2))
        await played.scaling.stop()

    asyncio.run(main())


@pytest.mark.usefixtures("fast")
def test_bounds_of_which_the_fewest_fit_are_taken_and_others_change_nothing() -> None:
    async def main() -> None:
        played = Played(1, 1, fit=3)
        played.need(8)
        await played.scaling.set_bounds(2, 8)
        assert (played.scaled, played.num_copies, played.bounds) == ([8, 2], 2, (2, 2, 2))
        for least in (4, 8):
            with pytest.raises(InsufficientMemoryError):
                await played.scaling.set_bounds(least, 8)
        assert (played.num_copies, played.bounds) == (2, (2, 2, 2))
        await played.scaling.stop()

    asyncio.run(main())


@pytest.mark.usefixtures("fast")
def test_copies_that_could_not_be_started_are_asked_for_again() -> None:
    async def main() -> None:
        played = Played(1, 3)
        played.need(3)
        await until(lambda: played.num_copies == 3)
        played.num_copies = 2  # one was started in vain
        await until(lambda: played.num_copies == 3)
        assert played.scaled == [3, 3]
        await played.scaling.stop()

    asyncio.run(main())


@pytest.mark.usefixtures("fast")
def test_what_keeps_copies_from_being_started_is_logged_and_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        played = Played(1, 3)
        fails = [ModelError("the files are gone")]
        scale = played.scaling._scale

        async def failing(number: int) -> None:
            if fails:
                raise fails.pop()
            await scale(number)

        played.scaling._scale = failing
        played.need(3)
        await until(lambda: played.num_copies == 3)
        assert "there are still 1 copies: the files are gone" in caplog.text
        await played.scaling.stop()

    asyncio.run(main())


@pytest.mark.usefixtures("fast")
def test_nothing_changes_after_the_end() -> None:
    async def main() -> None:
        played = Played(1, 4)
        played.may_go_on.clear()
        played.need(2)
        await until(lambda: played.scaled == [2])
        waiting = asyncio.create_task(played.scaling.set_bounds(3, 3))
        await asyncio.sleep(0)
        ending = asyncio.create_task(played.scaling.stop())
        await asyncio.sleep(0.02)
        assert not ending.done()  # what is being changed is changed before it
        played.may_go_on.set()
        await ending
        for change in (waiting, played.scaling.set_bounds(4, 4)):
            with pytest.raises(EngineError, match="are ending"):
                await change
        played.need(4)
        await asyncio.sleep(0.1)
        assert played.scaled == [2]

    asyncio.run(main())
