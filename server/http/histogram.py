"""A histogram that costs little per observation: one bisection, no lock, no labels."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence


class Histogram:
    """Counts by bucket, and a sum. Observed and read in one thread."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds``: ascending; a value belongs to the first bucket that it doesn't exceed."""
        self.sum = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Iterable[float]) -> None:
        bounds, counts = self._bounds, self._counts
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            self.sum += value

    def cumulative(self) -> list[tuple[str, int]]:
        """Bounds as text, the last one ``+Inf``, and how many values don't exceed them."""
        buckets = []
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((str(bound), total))
        return buckets
