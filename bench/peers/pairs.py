"""Alternating measurement: ours, theirs and the roofs, pair by pair, until there are enough."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from bench.peers.process import SideError
from bench.peers.row import NUM_PAIRS, Pair, Row
from bench.peers.side import Side
from bench.peers.work import WORKS, Figure, Work
from lmi_core.bench.roofs import Roofs


@dataclass(frozen=True, slots=True)
class Pace:
    num_pairs: int = NUM_PAIRS
    row_s: float = 300.0
    """No pair begins later than this after the row's first."""
    deadline: float = float("inf")
    """On the monotonic clock; no pair begins after it."""
    settle_s: float = 0.5
    """Between two measurements: an engine's threads may spin for a while after their work."""


def measure_pairs(
    row: Row,
    ours: Side,
    theirs: Side,
    probe: Callable[[], Roofs],
    save: Callable[[Row], None],
    pace: Pace,
) -> None:
    """Add pairs to the row, saving it after each, until it has enough or time is over.

    Sides take turns at going first. A side's failure ends the row and stands in ``row.error``.
    """
    work = WORKS[row.what]
    until = min(time.monotonic() + pace.row_s, pace.deadline)
    try:
        for side in (ours, theirs):
            side.measure(work, seed=0)
        while len(row.pairs) < pace.num_pairs and time.monotonic() < until:
            row.pairs.append(_measure_pair(len(row.pairs), work, ours, theirs, probe, pace))
            save(row)
    except SideError as error:
        row.error = str(error)
        save(row)


def _measure_pair(
    number: int, work: Work, ours: Side, theirs: Side, probe: Callable[[], Roofs], pace: Pace
) -> Pair:
    at = datetime.now(UTC).isoformat(timespec="seconds")
    seed = 1 + number

    def measure(side: Side) -> Figure:
        time.sleep(pace.settle_s)
        return side.measure(work, seed)

    if number % 2 == 0:
        our_figure = measure(ours)
        roofs = _probe_after(probe, pace)
        their_figure = measure(theirs)
    else:
        their_figure = measure(theirs)
        roofs = _probe_after(probe, pace)
        our_figure = measure(ours)
    return Pair(at, our_figure, their_figure, roofs)


def _probe_after(probe: Callable[[], Roofs], pace: Pace) -> Roofs:
    time.sleep(pace.settle_s)
    return probe()
