"""What a step takes, by the rows, logits and attention in it: figures of measurements, added up.

``LLAMA_160M_BF16`` comes from the table of ``bench/results/README.md``, section "Engine on CPU"
(two cores, a quiet machine): decode steps of 1, 8 and 32 rows at contexts around 192 tokens, of
which attention has 8.2 ms at 32; prompts of 512 and 2048 tokens, whose difference beyond their rows
is attention; and the engine's share of a step before steps were submitted ahead. Linears of 64 rows
and more are taken to be as efficient as those of 512 to a few percent, and the head to have 22 % of
the matrices' time, as of their weights. Between and beyond these points lines are straight.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

Points = tuple[tuple[int, float], ...]
"""(rows, seconds), ascending."""


class Work(NamedTuple):
    """A sequence's part of a step: ``num_tokens`` rows behind ``start`` tokens."""

    start: int
    num_tokens: int
    has_logits: bool

    @property
    def num_keys(self) -> int:
        """Keys that its rows attend to, each row's own included."""
        return self.num_tokens * self.start + self.num_tokens * (self.num_tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """A model on a machine."""

    rows_s: Points
    """All rows, without attention and logits."""
    logits_s: Points
    """Rows whose logits are wanted."""
    decode_key_s: float
    """A key that one row reads alone."""
    prompt_key_s: float
    """A key read by one row of a prompt's chunk."""
    gap_s: float
    """From the end of a step to the next one's start, where that needs the first one's tokens."""
    mixed: float = 1.0
    """So many times the sum a step takes in which rows of prompts are beside texts that decode."""
    spread: tuple[float, ...] = (1.0,)
    """How many times the median single steps took that were alike."""

    def scaled(self, factors: Points) -> StepSeconds:
        """So many times as long, by the rows: on lines between ``factors``, and as the nearest of
        them beyond. Their rows become points."""
        first, last = factors[0], factors[-1]

        def factor(num_rows: int) -> float:
            return _on_line(factors, min(max(num_rows, first[0]), last[0]))

        def points(old: Points) -> Points:
            known = {num_rows for num_rows, _ in (*old, *factors) if num_rows <= old[-1][0]}
            return tuple((rows, _on_line(old, rows) * factor(rows)) for rows in sorted(known))

        return replace(
            self,
            rows_s=points(self.rows_s),
            logits_s=points(self.logits_s),
            decode_key_s=self.decode_key_s * factor(32),
            prompt_key_s=self.prompt_key_s * factor(2048),
        )

    def of(self, works: Sequence[Work]) -> float:
        """Seconds of a step that isn't empty."""
        seconds = _on_line(self.rows_s, sum(work.num_tokens for work in works))
        num_logits = sum(work.has_logits for work in works)
        seconds += _on_line(self.logits_s, num_logits) if num_logits else 0.0
        for work in works:
            key_s = self.decode_key_s if work.num_tokens == 1 else self.prompt_key_s
            seconds += key_s * work.num_keys
        are_single = {work.num_tokens == 1 for work in works}
        return seconds * (self.mixed if len(are_single) > 1 else 1.0)


LLAMA_160M_BF16 = StepSeconds(
    rows_s=((1, 0.0049), (8, 0.0043), (32, 0.0145), (64, 0.0265), (128, 0.0515), (2048, 0.815)),
    logits_s=((1, 0.00145), (8, 0.00145), (32, 0.0041), (256, 0.0268)),
    decode_key_s=1.33e-6,
    prompt_key_s=1.69e-7,
    gap_s=0.0004,
)


def _on_line(points: Points, num_rows: int) -> float:
    """On the line through the two points beside ``num_rows``, or the last two."""
    above = min(max(1, bisect_left(points, (num_rows, 0.0))), len(points) - 1)
    (low, low_s), (high, high_s) = points[above - 1], points[above]
    return low_s + (high_s - low_s) * (num_rows - low) / (high - low)
