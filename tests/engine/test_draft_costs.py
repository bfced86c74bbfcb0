"""What a draft model brings and costs eight sequences or one, in virtual time."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lmi_core._native import StepCosts
from lmi_core.engine.model_drafts import ModelDrafts
from lmi_core.engine.sequence import SequenceState

NUM_PROMPT, NUM_NEW, MOST_ROWS = 64, 96, 128
TARGET = ([1, 8, 16, 32, 128], [6.6, 7.7, 12.5, 26.8, 75.0])
DRAFT = ([1, 8, 16, 128], [2.1, 2.5, 3.5, 11.0])
"""Numbers of rows, and milliseconds: about those of bench's 160m model in bf16 on two cores, and of
its first two layers."""


class Text(SimpleNamespace):
    __hash__ = object.__hash__


class Served:
    """Batches of sequences, of which each draft is right with the same chance."""

    def __init__(self, chance: float) -> None:
        self._rng = random.Random(1)
        self._chance = chance
        self._costs = StepCosts()
        runner: Any = SimpleNamespace(max_model_len=10**6, shift=0)
        self._drafts = ModelDrafts(runner, self._costs, block_size=16, max_depth=8)
        self.seconds = 0.0

    def run(self, count: int) -> None:
        """One batch until its last sequence has ended."""
        texts: list[Any] = [
            Text(
                token_ids=[1] * (NUM_PROMPT + 1),
                max_len=NUM_PROMPT + NUM_NEW,
                num_drafted=0,
                num_published=0,
                hashes=[],
                state=SequenceState.RUNNING,
            )
            for _ in range(count)
        ]
        while texts:
            self._step(texts)
            for text in texts:
                if len(text.token_ids) >= text.max_len:
                    text.state = SequenceState.FINISHED
                    self._drafts.end(text)
            texts = [text for text in texts if text.state is SequenceState.RUNNING]

    def _step(self, texts: list[Any]) -> None:
        depths, count = self._drafts.depths, len(texts)
        waits = bool(depths(texts, count, count, 64, ahead=True))
        ready = self._chain(depths(texts, count, count, 64, ahead=False)) if waits else {}
        gap_s = 0.0003 if waits else 0.00005
        self._costs.note_gap(gap_s, ahead=not waits)
        self._compute(TARGET, count + sum(ready.values()), self._costs)
        self.seconds += gap_s
        for text in texts:
            num_right = 0
            if depth := ready.get(text, 0):
                while num_right < depth and self._rng.random() < self._chance:
                    num_right += 1
                text.num_drafted += min(num_right, depth - 1)
                self._drafts.count(text, depth, num_right)
            text.token_ids += [1] * (1 + num_right)

    def _chain(self, depths: list[tuple[Any, int]]) -> dict[Any, int]:
        """As ``ModelDrafts.begin``: what is missing first, as much as fits into a step."""
        num_left, num_rows, ready = MOST_ROWS, 0, {}
        missing = {text: max(1, len(text.token_ids) - text.num_drafted) for text, _ in depths}
        for text, depth in sorted(depths, key=lambda item: missing[item[0]]):
            taken = min(missing[text], num_left)
            num_left, num_rows = num_left - taken, num_rows + taken
            text.num_drafted = len(text.token_ids) - missing[text] + taken
            if taken == missing[text]:
                ready[text] = depth
        self._drafts._note_begun(ready)
        self._compute(DRAFT, num_rows, self._drafts._costs)
        for i in range(1, max(ready.values(), default=0)):
            rows = sum(depth > i for depth in ready.values())
            self._compute(DRAFT, rows, self._drafts._costs)
        return ready

    def _compute(self, table: tuple[list[int], list[float]], rows: int, costs: StepCosts) -> None:
        seconds = np.interp(rows, *table) * 1e-3 * self._rng.gauss(1, 0.02)
        costs.note(rows, seconds)
        self.seconds += seconds


def speed(chance: float, count: int, num_batches: int = 12) -> float:
    """Of what it is without drafts."""
    served = Served(chance)
    for _ in range(num_batches):
        served.run(count)
    step_s = float(np.interp(count, *TARGET)) * 1e-3 + 0.00005
    return (NUM_NEW - 1) * num_batches * step_s / served.seconds


@pytest.mark.parametrize("chance", [0.0, 0.2, 0.5, 0.7])
def test_drafts_that_do_not_pay_cost_little(chance: float) -> None:
    assert speed(chance, 8) > 0.98


def test_drafts_that_pay_are_used() -> None:
    assert speed(1.0, 1) > 2
    assert speed(0.9, 1) > 1.4
    assert speed(1.0, 4) > 1.2
