"""Draft models and heads draft what a grammar allows, and change nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lmi_core.errors import UserError
from lmi_core.structured import guidance
from lmi_core.structured.grammar import Grammar
from tests.engine.draft_models import near_copy
from tests.engine.eagle_heads import write_head as write_eagle
from tests.engine.random_drafts import draft_whatever_it_costs
from tests.engine.test_medusa_heads import write_heads
from tests.engine.test_model_drafts import PARAMS, TARGET, both, copy_of_target, share

LETTERS = replace(PARAMS, grammar=Grammar.regex("([a-f]+ )*[0-9]{200}"), ignore_eos=False)


@pytest.fixture(autouse=True)
def _drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_whatever_it_costs(monkeypatch)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_model_itself_is_right_under_a_grammar(temperature: float) -> None:
    totals = both(copy_of_target(), replace(LETTERS, temperature=temperature), 4)
    assert share(totals) == 1.0
    assert totals.num_steps < 40


def test_every_kind_drafts_under_a_grammar(tmp_path: Path) -> None:
    params = replace(LETTERS, temperature=1.0, repetition_penalty=1.2)
    drafters = near_copy(*TARGET), write_heads(tmp_path / "medusa"), write_eagle(tmp_path / "eagle")
    for drafter in drafters:
        totals = both(drafter, params, 3)
        # Of less than twenty tokens that are allowed some are right by chance.
        assert 0.02 < share(totals) < 1.0


def test_texts_end_where_the_grammar_does() -> None:
    params = replace(LETTERS, grammar=Grammar.regex("[a-c]{1,30}"), temperature=1.0)
    both(copy_of_target(), params, 4)


def test_a_matcher_that_fails_behind_drafts_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that can't be followed is none; what fails without drafts fails with them."""
    accept, calls = guidance.GuidanceMatcher.accept, 0

    def fail_sometimes(matcher: guidance.GuidanceMatcher, token_id: int) -> None:
        nonlocal calls
        calls += 1
        if calls % 5 == 0 and matcher._num_behind_end == 0 and _is_in_thread():
            raise UserError("out of luck", field="grammar")
        accept(matcher, token_id)

    monkeypatch.setattr(guidance.GuidanceMatcher, "accept", fail_sometimes)
    totals = both(copy_of_target(), replace(LETTERS, temperature=1.0), 3)
    assert totals.num_model_accepted_tokens > 0


def _is_in_thread() -> bool:
    import threading

    return threading.current_thread().name == "lmi-mask"
