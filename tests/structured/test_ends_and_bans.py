"""How a text that is bound ends, and bans beside its grammar, on an engine of bytes for tokens."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from lmi_core.engine.outputs import FinishReason, TokenEvent
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError
from lmi_core.structured.grammar import Grammar
from tests.engine.fake_runner import VOCAB_SIZE, FakeRunner
from tests.engine.harness import (
    EOS_ID,
    assert_nothing_leaked,
    collect,
    make_engine,
    run,
    text,
    token_ids,
)


def fake(pattern: str, **changes: Any) -> tuple[list[TokenEvent], str]:
    async def use() -> list[TokenEvent]:
        async with make_engine(FakeRunner()) as engine:
            params = SamplingParams(grammar=Grammar.regex(pattern), **changes)
            events = await collect(engine, [1, 2, 3], params)
            await assert_nothing_leaked(engine)
            return events

    events = run(use())
    return events, text(events)


def test_a_complete_text_ends_with_the_end_of_sequence() -> None:
    events, shown = fake("[a-z]{4}")
    assert re.fullmatch("[a-z]{4}", shown)
    assert token_ids(events)[-1] == EOS_ID
    assert events[-1].finish_reason is FinishReason.EOS
    assert events[-1].num_generated_tokens == 5


@pytest.mark.parametrize(
    "changes", [{"ignore_eos": True}, {"min_new_tokens": 20}, {"max_new_tokens": 4}], ids=str
)
def test_without_an_end_of_sequence_it_ends_by_itself(changes: dict[str, Any]) -> None:
    events, shown = fake("[a-z]{4}", **changes)
    assert re.fullmatch("[a-z]{4}", shown)
    assert events[-1].finish_reason is FinishReason.EOS
    assert events[-1].num_generated_tokens == 4
    assert EOS_ID not in token_ids(events)


def test_a_text_cut_short_ends_by_its_length() -> None:
    events, shown = fake("[a-z]{40}", max_new_tokens=7)
    assert len(shown) == 7
    assert events[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("num_before", "names", "changes"),
    [
        (
            0,
            ["suppress_tokens", "guided_regex"],
            {"banned_token_ids": tuple(i for i in range(VOCAB_SIZE) if i != EOS_ID)},
        ),
        (1, ["no_repeat_ngram_size", "guided_regex"], {"no_repeat_ngram_size": 1}),
        (2, ["bad_words", "guided_regex"], {"bad_words": ("aaa",)}),
        (
            1,
            ["allowed_token_ids", "no_repeat_ngram_size"],
            {"allowed_token_ids": (9,), "no_repeat_ngram_size": 1, "grammar": None},
        ),
        (
            2,
            ["allowed_token_ids", "bad_words_ids", "min_new_tokens"],
            {
                "allowed_token_ids": (9, EOS_ID),
                "bad_words_ids": ((9, 9, 9),),
                "min_new_tokens": 6,
                "grammar": None,
            },
        ),
        (
            2,
            ["suppress_tokens", "bad_words_ids"],
            {
                "bad_words_ids": ((9, 9, 9),),
                "banned_token_ids": tuple(i for i in range(VOCAB_SIZE) if i != 9),
                "grammar": None,
            },
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_bans_that_leave_nothing_are_named(
    num_before: int, names: list[str], changes: dict[str, Any]
) -> None:
    """Nobody beside is disturbed."""

    async def main() -> None:
        async with make_engine(FakeRunner()) as engine:
            other = asyncio.create_task(collect(engine, [4], SamplingParams(max_new_tokens=9)))
            grammar = Grammar.regex("a{4}", field="guided_regex")
            params = SamplingParams(**{"max_new_tokens": 9, "grammar": grammar, **changes})
            words = f"behind {num_before} generated ones {' and '.join(names)} leave none"
            with pytest.raises(UserError, match=words) as raised:
                await collect(engine, [1, 2, 3], params)
            assert raised.value.field == names[0]
            assert len(await other) == 9
            await assert_nothing_leaked(engine)

    run(main())


def test_allowed_token_ids() -> None:
    async def main() -> None:
        async with make_engine() as engine:
            allowed = (65, 70, 97)
            params = SamplingParams(
                max_new_tokens=20, temperature=1.0, n=3, seed=1, allowed_token_ids=allowed
            )
            events = await collect(engine, [1, 2, 3], params)
            for choice in range(3):
                assert len(token_ids(events, choice)) == 20
            assert {event.token_id for event in events} == set(allowed)
            free = await collect(engine, [1, 2, 3], SamplingParams(max_new_tokens=20, seed=1))
            assert not {event.token_id for event in free} <= set(allowed)
            await assert_nothing_leaked(engine)

    run(main())


def test_allowed_token_ids_within_a_grammar() -> None:
    async def main() -> None:
        async with make_engine() as engine:
            grammar = Grammar.regex("(ab|cd)*x")
            ids = tuple(engine.tokenizer.encode_now("abx", add_special_tokens=False))
            for length in (2, 8):
                params = SamplingParams(
                    max_new_tokens=length, grammar=grammar, allowed_token_ids=(*ids, EOS_ID)
                )
                shown = text(await collect(engine, [1, 2], params))
                assert re.fullmatch("(ab)*(a|x)?", shown)
            clash = SamplingParams(max_new_tokens=9, grammar=grammar, allowed_token_ids=(ids[1],))
            with pytest.raises(UserError, match="allowed_token_ids"):
                await collect(engine, [1, 2], clash)
            await assert_nothing_leaked(engine)

    run(main())
