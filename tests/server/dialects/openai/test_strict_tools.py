"""Tools whose arguments must follow their schema in a text that is free otherwise."""

from __future__ import annotations

import asyncio
import json

import pytest

from lmi_core.errors import UserError
from lmi_core.tools.calls import CallStart, Content, ToolCallParser
from lmi_core.tools.forms import HERMES, LLAMA, ToolForm
from lmi_core.tools.tools import free_grammar, tool_of
from tests.server.dialects.openai.test_chat_tools import (
    NOW,
    TOOLS,
    WEATHER,
    parse,
)
from tests.server.test_structured import MESSAGES, serving_demo
from tests.structured.test_guidance import matches

STRICT_WEATHER = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
GOOD, BAD = '{"city": "Oslo", "days": 3}', '{"city": "Oslo", "days": "x"}'


def said(name: str, arguments: str, *, key: str = "arguments", tags: bool = True) -> str:
    call = f'{{"name": "{name}", "{key}": {arguments}}}'
    return f"<tool_call>\n{call}\n</tool_call>" if tags else call


@pytest.mark.parametrize("is_parallel", [False, True])
@pytest.mark.parametrize("style", [HERMES, LLAMA], ids=lambda form: form.name)
def test_text_is_free_but_for_the_arguments_of_strict_tools(
    style: ToolForm, is_parallel: bool
) -> None:
    tools = [tool_of(STRICT_WEATHER), tool_of(NOW)]
    grammar = free_grammar(tools, style, is_parallel=is_parallel)
    key = "arguments" if style is HERMES else "parameters"
    good, bad = said("weather", GOOD, key=key), said("weather", BAD, key=key)
    for text in ("", "Hello { you }", 'Say <tool> "x"\n1 < 2', good, f"Well. {good}"):
        assert matches(grammar, text), text
    assert matches(grammar, said("now", '{"any": ["thing"]}', key=key))
    assert matches(grammar, good + good) == is_parallel
    for text in (bad, f"Well. {bad}", good + bad, "<tool_call>no", said("other", "{}", key=key)):
        assert not matches(grammar, text), text
    # A call without tags is one in Llama's style only.
    is_text = style is HERMES
    assert matches(grammar, said("weather", GOOD, key=key, tags=False))
    assert matches(grammar, said("weather", BAD, key=key, tags=False)) == is_text
    assert matches(grammar, f" \n{said('weather', BAD, key=key, tags=False)}") == is_text


def test_strict_tools_of_a_free_choice_have_a_grammar() -> None:
    for choice in (None, "auto"):
        parsed = parse(tools=[STRICT_WEATHER, NOW], tool_choice=choice)
        assert parsed.requests[0].params.grammar is not None
        assert parse(tools=TOOLS, tool_choice=choice).requests[0].params.grammar is None


def test_calls_without_tags_are_text_where_the_grammar_knows_tags_only() -> None:
    text = said("weather", BAD, tags=False)
    assert ToolCallParser({"weather"}, needs_tags=True).push(text) == [Content(text)]
    assert isinstance(ToolCallParser({"weather"}).push(text)[0], CallStart)


def test_strict_must_be_a_truth_value() -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": "yes"}}
    with pytest.raises(UserError, match=r"tools\[0\]\.function\.strict"):
        parse(tools=[tool])


def test_a_bad_schema_of_a_tool_is_named() -> None:
    async def use() -> None:
        async with serving_demo(api="openai") as served:
            tool = {"function": {"name": "f", "parameters": {"type": "strange"}}}
            body = {"messages": MESSAGES, "tools": [tool], "tool_choice": "required"}
            answer = await served.post(body, "/v1/chat/completions")
            error = json.loads(answer.body)["error"]
            assert answer.status == 400
            assert error["param"] == "tools"
            assert "strange" in error["message"]

    asyncio.run(use())
