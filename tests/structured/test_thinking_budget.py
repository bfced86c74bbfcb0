"""Budgets for reasoning: exact to the token, whatever the model says."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from lmi_core.demo import MODEL_DIR
from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.structured.allowed_tokens import AllowedTokens
from lmi_core.structured.grammar import Grammar
from lmi_core.structured.thinking_budget import ThinkingBudget, ThinkingLimit
from tests.engine.harness import collect, text, token_ids
from tests.engine.random_drafts import SPECULATION, draft_at_random

BYTES = {0: b"a", 1: b"<t", 2: b">", 3: b"</", 4: b"t>", 5: b" ", 6: b"x</t>y", 7: b"<"}
SIZE = 8


def limit(num_tokens: int, *, is_open: bool = False, allowed: Any = None) -> ThinkingLimit:
    budget = ThinkingBudget(num_tokens=num_tokens, begin="<t>", end="</t>", is_open=is_open)
    grammar = None if allowed is None else AllowedTokens(allowed, SIZE, None)
    return ThinkingLimit(budget, (3, 4), BYTES.__getitem__, grammar)


def allowed(matcher: Any) -> set[int]:
    mask = np.zeros(1, np.uint32)
    matcher.fill_mask(mask)
    return {i for i in range(SIZE) if int(mask[0]) >> i & 1}


@pytest.mark.parametrize(
    ("num_tokens", "is_open", "before"),
    [
        (0, True, []),
        (0, False, [1, 2]),
        (2, True, [0, 0]),
        (2, False, [5, 5, 1, 2, 0, 3]),
        (1, False, [7, 4, 0]),
        (3, True, [3, 0, 3]),
    ],
)
def test_the_mark_is_forced_when_the_budget_is_used(
    num_tokens: int, is_open: bool, before: list[int]
) -> None:
    matcher = limit(num_tokens, is_open=is_open).matcher()
    for token_id in before:
        assert allowed(matcher) == set(range(SIZE))
        matcher.accept(token_id)
    for token_id in (3, 4):
        assert allowed(matcher) == {token_id}
        assert matcher.forced_tokens()[0] == token_id
        matcher.accept(token_id)
    assert allowed(matcher) == set(range(SIZE))
    assert matcher.is_spent


@pytest.mark.parametrize("before", [[0], [3, 4], [6], [1, 2, 6], [1, 2, 0, 3, 4]])
def test_what_ends_by_itself_is_left_alone(before: list[int]) -> None:
    matcher = limit(3, is_open=before[0] in (3, 6)).matcher()
    for token_id in [*before, 0, 0, 0, 0]:
        assert allowed(matcher) == set(range(SIZE))
        matcher.accept(token_id)
    assert matcher.is_spent


def test_drafts_are_taken_back() -> None:
    matcher = limit(2, is_open=True).matcher()
    assert matcher.num_allowed([0, 0, 0]) == 2
    assert matcher.num_allowed([0, 0, 3, 4, 0, 0]) == 6
    for token_id in (0, 0, 3, 4, 0, 0):
        matcher.accept(token_id)
    matcher.rollback(3)
    assert allowed(matcher) == {4}
    matcher.rollback(2)
    assert allowed(matcher) == set(range(SIZE))
    matcher.accept(0)
    assert allowed(matcher) == {3}


def test_a_budget_that_cant_be_kept_is_an_error() -> None:
    matcher = limit(1, is_open=True, allowed=(0, 1)).matcher()
    matcher.accept(0)
    with pytest.raises(UserError, match="can't end after 1 tokens") as refusal:
        allowed(matcher)
    assert refusal.value.field == "thinking_token_budget"


@pytest.mark.parametrize("drafts", [False, True])
def test_in_the_engine(drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything before the mark is as without a budget, and what follows it isn't bound by it."""
    settings: dict[str, Any] = {"speculation": SPECULATION} if drafts else {}
    if drafts:
        draft_at_random(monkeypatch, {}, 300)
    config = EngineConfig(model=MODEL_DIR, num_threads=1, kv_cache_bytes=32 << 20, **settings)

    async def use() -> None:
        async with Engine(config, check_integrity=True) as engine:
            params = {"temperature": 1.0, "seed": 5, "max_new_tokens": 24, "ignore_eos": True}
            free = await collect(engine, "A", SamplingParams(**params))
            end_ids = engine.tokenizer.encode_now("</think>", add_special_tokens=False)
            for num_tokens in (0, 1, 7):
                budget = ThinkingBudget(
                    num_tokens=num_tokens, begin="<think>", end="</think>", is_open=True
                )
                ids = token_ids(
                    await collect(engine, "A", SamplingParams(**params, thinking=budget))
                )
                assert ids[:num_tokens] == token_ids(free)[:num_tokens]
                assert ids[num_tokens : num_tokens + len(end_ids)] == end_ids
                assert len(ids) == 24
            budget = ThinkingBudget(num_tokens=4, begin="<think>", end="</think>", is_open=True)
            grammar = Grammar.lark('start: t "so"\nt[lazy]: /(.|\\n)*<\\/think>/')
            events = await collect(
                engine, "A", SamplingParams(**params, thinking=budget, grammar=grammar)
            )
            assert text(events).endswith("</think>so")
            assert token_ids(events)[4 : 4 + len(end_ids)] == end_ids

    asyncio.run(use())
