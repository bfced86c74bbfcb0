"""Drafts of random tokens and of those that will be sampled, whatever they cost."""

from __future__ import annotations

import random
from collections.abc import Sequence as Tokens
from typing import Any

import pytest

from lmi_core._native import StepCosts
from lmi_core.engine import speculation
from lmi_core.engine.sequence import Sequence
from lmi_core.engine.text_drafts import Draft
from lmi_core.settings.speculation_config import SpeculationConfig

SPECULATION = SpeculationConfig(max_draft_tokens=9)


class RandomDrafts:
    """Implements ``DraftSource``. Most drafts begin with what is true, where that is known."""

    def __init__(self, truths: dict[Any, list[int]], vocab_size: int) -> None:
        """``truths``: outputs by (prompt ids, seed, choice)."""
        self._truths = truths
        self._vocab_size = vocab_size
        self._random = random.Random(5)
        self.num_drafts = 0

    def draft(self, sequence: Sequence, max_tokens: int) -> Draft:
        rng = self._random
        if rng.random() < 0.2:
            return Draft([], [])
        truth = self._truths.get(key_of(sequence), [])[sequence.num_generated :]
        tokens = truth[: rng.choice([0, 1, 3, 9])]
        tokens += [rng.randrange(self._vocab_size) for _ in range(rng.choice([0, 1, 4]))]
        self.num_drafts += 1
        return Draft(tokens[:max_tokens], [1.0] * len(tokens[:max_tokens]))

    def next_chances(self, sequence: Sequence, max_tokens: int) -> list[float]:
        return self._random.choice([[], [0.5], [1.0, 1.0]])[:max_tokens]

    def end(self, sequence: Sequence) -> None:
        pass


def key_of(sequence: Sequence) -> tuple[Tokens[int], int | None, int]:
    params = sequence.request.request.params
    return tuple(sequence.request.prompt_ids), params.seed, sequence.choice


def draft_at_random(
    monkeypatch: pytest.MonkeyPatch, truths: dict[Any, list[int]], vocab_size: int
) -> RandomDrafts:
    """Engines with ``SPECULATION`` draft so from now on, as much as there is room for."""
    source = RandomDrafts(truths, vocab_size)
    monkeypatch.setattr(speculation, "TextDrafts", lambda config: source)
    draft_whatever_it_costs(monkeypatch)
    return source


def draft_whatever_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """From texts, grammars and models: what steps take on a busy machine decides nothing."""

    def depths(
        self: StepCosts,
        num_rows: int,
        num_tokens: float,
        chances: list[list[float]],
        most: int,
        *,
        ahead: bool,
    ) -> list[int]:
        result = []
        for each in chances:
            result.append(min(len(each), most))
            most -= result[-1]
        return result

    def common_depth(
        self: StepCosts,
        drafting: StepCosts,
        chances: list[float],
        num_rows: int,
        num_tokens: float,
        deepest: int,
        extra_s: float,
        *,
        ahead: bool,
    ) -> int:
        return deepest if chances else 0

    monkeypatch.setattr(StepCosts, "depths", depths)
    monkeypatch.setattr(StepCosts, "common_depth", common_depth)
