"""Chats with tools and a format: a text is calls or an answer of that format, by one grammar."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import pytest

from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError
from lmi_core.tools.forms import FORMS
from lmi_core.tools.reasoning import HARMONY
from tests.engine.harness import collect, text
from tests.server.dialects.openai.test_answer_forms import (
    NOW,
    SCHEMA,
    STRICT,
    ULM,
    WEATHER,
    enforced,
    flat,
    message,
    parse,
)
from tests.structured.test_engine import demo_config
from tests.structured.test_guidance import matches

ANSWER = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"enum": [1, 2]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": ANSWER}}
BOTH: dict[str, Any] = {"tools": [STRICT, NOW], "response_format": FORMAT}
BOB = '{"name": "Bob", "size": 1}'
HARMONY_FIELDS = {"form": "openai", "reasoning": HARMONY}


def form_fields(form: str) -> dict[str, Any]:
    return {"form": form, "reasoning": HARMONY if form == "openai" else None}


def lead(form: str) -> str:
    return "<|channel|>final<|message|>" if form == "openai" else ""


@pytest.mark.parametrize("form", FORMS)
def test_a_text_is_calls_or_an_answer(form: str) -> None:
    fields = {**form_fields(form), **BOTH}
    grammar = parse(**fields).requests[0].params.grammar
    assert grammar is not None
    weather, now = enforced(form, "weather", ULM), enforced(form, "now", '{"any": 1}')
    answer = lead(form) + BOB
    for good in (weather, now, answer, answer.replace('"Bob"', '"name"')):
        assert matches(grammar, good), good
    wrong = enforced(form, "weather", '{"city": 1}')
    for bad in (wrong, enforced(form, "no", "{}"), "Hello", "", answer.replace("1", "3")):
        assert not matches(grammar, bad), bad
    assert not matches(grammar, answer + weather)
    assert not matches(grammar, weather + answer)
    assert flat(message(answer, **fields)) == (BOB, "", [], "stop")
    assert flat(message(weather, **fields))[2:] == ([["weather", ULM]], "tool_calls")


@pytest.mark.parametrize("form", FORMS)
def test_marks_within_an_answer_are_its_own(form: str) -> None:
    written = FORMS[form].written
    for mark in {FORMS[form].opening, written.begin, written.head_of("now")} - {""}:
        if form != "openai":  # whose channels begin anywhere
            answer = json.dumps({"name": f"{mark}{{}}", "size": 1}, ensure_ascii=False)
            assert flat(message(answer, form=form, **BOTH)) == (answer, "", [], "stop")


def test_reasoning_comes_before_either() -> None:
    grammar = parse(reasoning="qwen3", **BOTH).requests[0].params.grammar
    assert grammar is not None
    call = enforced("hermes", "weather", ULM)
    for said in (call, BOB):
        for good in (said, f"<think>Hm {{.</think>\n\n{said}"):
            assert matches(grammar, good), good
        assert not matches(grammar, f"Hm. {said}")
    whole = flat(message(f"<think>Hm.</think>\n{call}", reasoning="qwen3", **BOTH))
    assert whole == ("", "Hm.", [["weather", ULM]], "tool_calls")


def test_only_strict_tools_have_valid_arguments_where_none_needs_to_be_called() -> None:
    odd = enforced("hermes", "weather", '{"city": 1}')
    for tool, is_held in ((STRICT, True), (WEATHER, False)):
        grammar = parse(tools=[tool], response_format=FORMAT).requests[0].params.grammar
        assert grammar is not None
        assert matches(grammar, odd) != is_held


def test_a_call_that_must_come_leaves_no_place_for_an_answer() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        grammar = parse(tool_choice=choice, **BOTH).requests[0].params.grammar
        assert grammar is not None
        assert matches(grammar, enforced("hermes", "weather", ULM))
        assert not matches(grammar, BOB)
    params = parse(tool_choice="none", **BOTH).requests[0].params
    assert params.grammar is not None
    assert params.grammar.instead is None
    alone = parse(tools=BOTH["tools"], guided_choice=["yes", "no"]).requests[0].params.grammar
    assert alone is not None
    assert matches(alone, "no")
    assert not matches(alone, "maybe")


@pytest.mark.parametrize(
    "asked",
    [
        {"guided_regex": "[a-z]*"},
        {"guided_grammar": 'start: "a"'},
        {"structured_outputs": {"structural_tag": {"format": {"type": "any_text"}}}},
    ],
)
def test_texts_that_calls_cant_be_told_from(asked: Any) -> None:
    with pytest.raises(UserError, match="can have a JSON schema") as refused:
        parse(tools=[NOW], **asked)
    assert refused.value.field == next(iter(asked))
    assert parse(tools=[NOW], tool_choice="required", **asked).requests[0].params.grammar


def test_what_a_random_model_says_is_one_of_both() -> None:
    """In every form, whole and streamed."""
    kinds: set[bool] = set()

    async def use() -> None:
        async with Engine(demo_config()) as engine:
            for form in sorted(FORMS.keys() - {"openai"}):  # whose reasoning needn't end
                fields = {"form": form, **BOTH, "tools": [STRICT]}
                fields["parallel_tool_calls"] = False
                grammar = parse(**fields).requests[0].params.grammar
                for seed in range(3):
                    params = SamplingParams(
                        grammar=grammar, temperature=3, seed=seed, max_new_tokens=300
                    )
                    said = text(await collect(engine, "A", params))
                    content, _, calls, _ = flat(message(said, **fields))
                    kinds.add(bool(calls))
                    if calls:
                        [[name, arguments]] = calls
                        assert not content
                        assert name == "weather"
                        jsonschema.validate(json.loads(arguments), SCHEMA)
                    else:
                        jsonschema.validate(json.loads(content), ANSWER)

    asyncio.run(use())
    assert kinds == {True, False}
