"""Whether drafts of a model pay is found out again and again, less often where they don't."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from lmi_core._native import StepCosts
from lmi_core.engine.model_drafts import ModelDrafts
from lmi_core.engine.sequence import SequenceState


def costs(base_s: float, row_s: float) -> StepCosts:
    result = StepCosts()
    for rows in (1, 2, 4, 8):
        result.note(rows, base_s + row_s * rows)
    return result


class Text(SimpleNamespace):
    __hash__ = object.__hash__


def sequence() -> Any:
    tokens = [1] * 40
    return Text(
        token_ids=tokens,
        max_len=100_000,
        num_drafted=0,
        num_published=0,
        hashes=[],
        state=SequenceState.RUNNING,
    )


class Steps:
    """Steps of sequences, whose drafts are right with the chances that ``is_right`` has."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        max_depth: int = 4,
        base_s: float = 0.02,
        draft_s: float = 0.004,
    ) -> None:
        runner: Any = SimpleNamespace(max_model_len=100_000, shift=0)
        target = costs(base_s, 0.001)
        self.drafts = ModelDrafts(runner, target, block_size=16, max_depth=max_depth)
        monkeypatch.setattr(self.drafts, "_costs", costs(draft_s, draft_s / 20))
        self._rng = random.Random(0)

    def run(self, sequences: list[Any], is_right: dict[int, float], count: int) -> list[int]:
        """Returns how many were drafted for in each step."""
        seen = []
        for _ in range(count):
            depths = self.drafts.depths(sequences, len(sequences), len(sequences), 64, ahead=False)
            self.drafts._note_begun([s for s, _ in depths])
            for each, depth in depths:
                each.num_drafted = len(each.token_ids) - 1
                chance, num_right = is_right[id(each)], 0
                while num_right < depth and self._rng.random() < chance:
                    num_right += 1
                self.drafts.count(each, depth, num_right)
            assert all(depth <= self.drafts._max_depth for _, depth in depths)
            seen.append(len(depths))
        return seen


def test_useless_drafts_are_tried_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, only = Steps(monkeypatch), sequence()
    seen = steps.run([only], {id(only): False}, 8000)
    assert sum(seen[:20]) < 12
    assert 5 <= sum(seen[20:]) <= 14
    assert sum(seen[4000:]) >= 2


def test_no_trial_is_due_where_there_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    drafts, texts = Steps(monkeypatch).drafts, [sequence(), sequence()]
    for _ in range(200):
        assert drafts.depths(texts, 2, 2, 0, ahead=True) == []
    assert not drafts.is_trying


def test_what_a_shared_prefix_has_is_not_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, only = Steps(monkeypatch, draft_s=0.05), sequence()
    only.token_ids, only.max_len = [1] * 4100, 4110
    lacking = steps.drafts.depths([only], 1, 1, 64, ahead=False)
    only.hashes = [bytes([i]) for i in range(256)]
    only.num_published, only.block_ids = 256, list(range(256))
    steps.drafts._contents = dict(enumerate(only.hashes))
    found = steps.drafts._num_behind(only)
    assert (lacking, found) == ([], 4)


def test_trials_are_no_deeper_than_drafts_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, only = Steps(monkeypatch, max_depth=1), sequence()
    assert sum(steps.run([only], {id(only): False}, 500)) > 2


def test_good_ones_are_found_at_the_next_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, only = Steps(monkeypatch), sequence()
    steps.run([only], {id(only): False}, 300)
    seen = steps.run([only], {id(only): True}, 800)
    first = seen.index(1)
    assert first < 300
    assert sum(seen[first + 40 :]) == 800 - first - 40


def test_one_is_tried_while_another_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, good, late = Steps(monkeypatch), sequence(), sequence()
    is_right = {id(good): True, id(late): False}
    seen = steps.run([good, late], is_right, 400)
    assert seen[-100:].count(2) <= 2
    is_right[id(late)] = True
    assert steps.run([good, late], is_right, 1200)[-10:] == [2] * 10


def test_ones_that_are_often_right_and_do_not_pay_are_tried_less_and_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A right trial is no news of them; of a text whose drafts were wrong it is."""
    steps, texts = Steps(monkeypatch, base_s=0.005, draft_s=0.001), [sequence() for _ in range(8)]
    assert 1 <= sum(steps.run(texts, {id(text): 0.7 for text in texts}, 2000)) <= 40
    seen = steps.run(texts, {id(text): 1.0 for text in texts}, 5000)
    assert seen[-10:] == [8] * 10


def test_nothing_is_tried_where_not_even_right_drafts_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, texts = Steps(monkeypatch, base_s=0.005, draft_s=0.03), [sequence() for _ in range(8)]
    assert sum(steps.run(texts, {id(text): 1.0 for text in texts}, 500)) == 0
