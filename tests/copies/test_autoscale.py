"""Numbers of copies that follow the load, second by second."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from lmi_core.copies import autoscale
from lmi_core.copies.autoscale import Autoscaler, Autoscaling, Demand
from lmi_core.errors import InsufficientMemoryError
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


def test_it_looks_while_there_is_load_and_stays_within_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(autoscale, "LOOK_S", 0.01)
    monkeypatch.setattr(autoscale, "RISE_S", 0.03)
    demands, scaled, num_looks = [replace(IDLE, num_seqs=24)], [], 0

    def demand() -> Demand:
        nonlocal num_looks
        num_looks += 1
        return demands[0]

    async def scale(number: int) -> None:
        scaled.append(number)
        if number > 2:
            raise InsufficientMemoryError("no room")

    async def main() -> None:
        scaling = Autoscaling(Autoscaler(1, 4, idle_s=0.05), demand, scale)
        scaling.wake()
        await until(lambda: bool(scaled))
        assert scaled == [3]
        await until(lambda: scaling.scaler.num_wanted == 1)
        assert scaling.scaler.most == 1  # what there is no memory for isn't tried again
        assert scaling.set_bounds(1, 2) == 2
        scaling.wake()
        demands[0] = IDLE
        await until(lambda: scaled[-1] == 1)
        await asyncio.sleep(0.05)
        num_before = num_looks
        await asyncio.sleep(0.05)
        assert num_looks == num_before  # nothing wakes up where nothing runs
        scaling.stop()

    asyncio.run(main())
