"""What steps take by their number of rows, as measured while they run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

_WEIGHT = 0.2
"""Of the newest of several measurements of alike steps."""
_MAX_AGE = 1000
"""Steps after which what was measured may be another load's."""
_FIRST_SLOPE = 0.1
"""Cost of one more row in steps of one, until steps of several numbers of rows were seen."""
_NUM_EXACT = 16
"""Larger numbers of rows are counted in classes an eighth apart."""


class StepCosts:
    """Means of the last steps, with straight lines between the numbers of rows that were seen."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, int]] = {}
        """Of a number of rows: seconds, and the number of the last step that had them."""
        self._num_steps = 0
        self._gaps_s = {False: 0.0, True: 0.0}
        """Between two steps: of which the second waits for the first one's tokens, and not."""

    def note(self, num_rows: int, seconds: float) -> None:
        """A step was executed; ``seconds`` above 0."""
        self._num_steps += 1
        size = _size_class(num_rows)
        mean, _ = self._seen.get(size, (seconds, 0))
        self._seen[size] = (mean + _WEIGHT * (seconds - mean), self._num_steps)

    def note_gap(self, seconds: float, *, ahead: bool) -> None:
        """So long after a step the next one began; ``ahead``: it was submitted before."""
        self._gaps_s[ahead] += _WEIGHT * (max(0.0, seconds) - self._gaps_s[ahead])

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._seen)

    def seconds(self, num_rows: Sequence[int], *, ahead: bool) -> list[float]:
        """From the end of a step to that of the next, of each of these numbers of rows."""
        points, gap_s = self._points(), self._gaps_s[ahead]
        return [_seconds(points, num) + gap_s for num in num_rows]

    def num_worthwhile(
        self, num_rows: int, num_tokens: int, chances: Sequence[float], *, ahead: bool
    ) -> int:
        """With how many drafts a step of ``num_rows`` rows and ``num_tokens`` tokens brings most of
        them a second. ``chances``: of each being right, in falling order; ``ahead``: steps without
        drafts are submitted before the last one's tokens are known."""
        if not self._seen:
            return len(chances)
        points = self._points()
        gap_s = self._gaps_s[False]
        best, best_rate = 0, num_tokens / (_seconds(points, num_rows) + self._gaps_s[ahead])
        expected = float(num_tokens)
        for count, chance in enumerate(chances, start=1):
            expected += chance
            rate = expected / (_seconds(points, num_rows + count) + gap_s)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _points(self) -> list[tuple[int, float]]:
        oldest = self._num_steps - _MAX_AGE
        seen = self._seen.items()
        return sorted((size, mean) for size, (mean, number) in seen if number >= oldest)


def _seconds(points: list[tuple[int, float]], num_rows: int) -> float:
    """Of a step of so many rows, on the lines through these points."""
    above = bisect_left(points, (num_rows, 0.0))
    if above == 0:
        return points[0][1]
    low, low_s = points[above - 1]
    if above < len(points):
        high, high_s = points[above]
        return low_s + (high_s - low_s) * (num_rows - low) / (high - low)
    slope = _FIRST_SLOPE * low_s / low
    if len(points) > 1:
        slope = max(0.0, low_s - points[0][1]) / (low - points[0][0])
    return low_s + slope * (num_rows - low)


def _size_class(num_rows: int) -> int:
    if num_rows <= _NUM_EXACT:
        return num_rows
    width = 1 << (num_rows.bit_length() - 4)
    return num_rows // width * width + width // 2
