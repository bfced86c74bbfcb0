"""Chats whose answers are taken apart: families' forms of calls, reasoning, what is enforced."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from lmi_core.config.resolve import resolve
from lmi_core.config.table.vllm import REASONING_FORMS, TOOL_FORMS
from lmi_core.demo import MODEL_DIR
from lmi_core.engine.outputs import FinishReason, TokenEvent
from lmi_core.errors import ConfigError, UserError
from lmi_core.structured.marks import Marks, quote_mark, text_before_mark
from lmi_core.structured.thinking_budget import ThinkingBudget
from lmi_core.text.chat import ChatTemplate
from lmi_core.text.tokenizer import Tokenizer
from lmi_core.tools.forms import ALIASES, FORMS, form_named
from lmi_core.tools.reasoning import HARMONY, REASONING
from lmi_server.dialects.base import Call, ParsedCall
from lmi_server.dialects.openai.openai import parse_chat
from lmi_server.http.metrics import Metrics
from lmi_server.models.loading import recipe_of
from tests.server.dialects.openai.test_openai_formats import objects
from tests.server.parsing import model_of
from tests.structured.test_guidance import matches
from tests.text.tokenizers_for_tests import byte_level

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
ULM = '{"city": "Ulm"}'
SOURCE = (
    "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}A:"
    "{% if thinking is defined %}{{ thinking }}{% endif %}"
)


def parse(form: str = "hermes", reasoning: str | None = None, **fields: Any) -> ParsedCall:
    template = ChatTemplate(
        {"default": SOURCE},
        tool_form=form_named(form),
        reasoning=None if reasoning is None else REASONING[reasoning],
    )
    body = {"messages": [{"role": "user", "content": "Go"}], **fields}
    call = Call(request_id="r", body=json.dumps(body).encode())
    return parse_chat(model_of(chat_template=template), call)


def events(text: str) -> list[TokenEvent]:
    """A token per character."""
    return [
        TokenEvent(
            request_id="r",
            choice=0,
            token_id=7,
            text=char,
            num_generated_tokens=number,
            finish_reason=FinishReason.EOS if number == len(text) else None,
        )
        for number, char in enumerate(text, 1)
    ]


def message(text: str, **fields: Any) -> dict[str, Any]:
    """The choice of a whole answer, which the streamed one must equal."""
    whole = parse(**fields).renderer
    whole.feed(0, events(text))
    [choice] = json.loads(whole.finish())["choices"]
    streamed = parse(**fields, stream=True).renderer
    frames = b"".join(streamed.feed(0, [event]) for event in events(text)) + streamed.finish()
    assert joined(objects(frames)) == flat(choice)
    assert isinstance(choice, dict)
    return choice


def joined(chunks: Sequence[dict[str, Any]]) -> tuple[Any, ...]:
    content, reasoning, calls, finish = "", "", [], None
    for chunk in chunks:
        [choice] = chunk["choices"]
        delta, finish = choice["delta"], choice["finish_reason"] or finish
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning_content") or ""
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"].get("arguments", "")
    return content, reasoning, calls, finish


def flat(choice: dict[str, Any]) -> tuple[Any, ...]:
    said = choice["message"]
    calls = [
        [call["function"]["name"], call["function"]["arguments"]]
        for call in said.get("tool_calls", [])
    ]
    reasoning = said.get("reasoning_content")
    assert said.get("reasoning") == reasoning
    return said["content"] or "", reasoning or "", calls, choice["finish_reason"]


def test_reasoning_content_and_calls() -> None:
    text = f"<think>\nHm.\n</think>\n\nSo:\n[TOOL_CALLS]weather[ARGS]{ULM}"
    choice = message(text, form="mistral", reasoning="qwen3", tools=[WEATHER, NOW])
    assert flat(choice) == ("So:\n", "Hm.", [["weather", ULM]], "tool_calls")


def test_reasoning_alone() -> None:
    assert flat(message("<think>Hm.", reasoning="qwen3"))[:2] == ("", "Hm.")
    choice = message("<think>Hm.</think>Yes", reasoning="qwen3")
    assert choice["message"]["content"] == "Yes"
    choice = message("Yes", reasoning="qwen3")
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("Yes", None)
    assert "reasoning_content" not in message("Yes")["message"]


def test_reasoning_that_isnt_wanted() -> None:
    fields = {"reasoning": "qwen3", "include_reasoning": False}
    said = message("<think>Hm.</think>Yes", **fields)["message"]
    assert said == {"role": "assistant", "content": "Yes"}


@pytest.mark.parametrize(
    ("thinking", "content", "reasoning"),
    [("<think>\n", "Yes", "Hm."), ("<think>\n\n</think>\n", "Hm.</think>Yes", "")],
)
def test_the_template_begins_or_ends_reasoning(thinking: str, content: str, reasoning: str) -> None:
    fields = {"reasoning": "qwen3", "chat_template_kwargs": {"thinking": thinking}}
    assert flat(message("Hm.</think>Yes", **fields))[:2] == (content, reasoning)


def test_harmony_without_tools() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes"
    )
    assert flat(message(text, form="openai", reasoning=HARMONY))[:2] == ("Yes", "Hm.")
    params = parse("openai", HARMONY).requests[0].params
    assert "<|channel|>" in params.kept_special_tokens


NUMBER = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"reasoning": "qwen3"}, ["7", "<think>{ 1 }</think>7"], ["Hm.</think>7", "<think>Hm."]),
        (
            {"reasoning": "deepseek_r1"},
            ["Hm. 8</think>\n\n7", "</think>7"],
            ["7", "a</think>b", "a</think>" + 9 * " " + "7"],
        ),
        (
            {"form": "openai", "reasoning": HARMONY},
            [
                "<|channel|>final<|message|>7",
                "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
                "<|channel|>final<|message|>7",
            ],
            ["7", "<|channel|>commentary<|message|>7"],
        ),
        (
            {"reasoning": "deepseek_r1", "chat_template_kwargs": {"thinking": "</think>\n"}},
            ["7"],
            ["<think>Hm.</think>7", "Hm.</think>7"],
        ),
    ],
)
@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": NUMBER},
        {"guided_regex": "[0-9]"},
        {"guided_choice": ["7", "8"]},
        {"guided_grammar": "start: /[0-9]/"},
        {"structured_outputs": {"structural_tag": {"format": {"type": "regex", "pattern": "7"}}}},
    ],
)
def test_a_grammar_of_the_requests_own_holds_once_reasoning_is_over(
    asked: Any, fields: Any, good: list[str], bad: list[str]
) -> None:
    grammar = parse(**fields, **asked).requests[0].params.grammar
    assert grammar is not None
    for text in good:
        assert matches(grammar, text), text
        assert message(text, **fields, **asked)["message"]["content"] == "7"
    for text in bad:
        assert not matches(grammar, text), text


def enforced(form: str, name: str, arguments: str) -> str:
    written = FORMS[form].written
    return (
        written.begin + written.head.replace("NAME", name) + arguments + written.tail + written.end
    )


@pytest.mark.parametrize("form", FORMS)
def test_enforced_calls_of_every_form(form: str) -> None:
    def follows(text: str, **fields: Any) -> bool:
        fields = {"tools": [WEATHER, NOW], "tool_choice": "required", **fields}
        grammar = parse(form, fields.pop("reasoning", None), **fields).requests[0].params.grammar
        assert grammar is not None
        return matches(grammar, text)

    good, now = enforced(form, "weather", ULM), enforced(form, "now", "{}")
    assert follows(good)
    assert follows(now)
    assert not follows(enforced(form, "weather", '{"city": 1}'))
    assert not follows("Hello")
    named = {"type": "function", "function": {"name": "weather"}}
    assert follows(good, tool_choice=named)
    assert not follows(now, tool_choice=named)
    subset = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    assert follows(good, tool_choice=subset)
    assert not follows(now, tool_choice=subset)
    assert follows(f"<think>I could {{ }} say.</think>\n{good}", reasoning="qwen3")
    assert follows(good, reasoning="qwen3")
    assert follows(f"So.</think>{good}", reasoning="deepseek_r1")
    assert not follows(good, reasoning="deepseek_r1")
    [call] = message(good, form=form, tools=[WEATHER], tool_choice="required")["message"][
        "tool_calls"
    ]
    assert call["function"] == {"name": "weather", "arguments": ULM}


STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]


@pytest.mark.parametrize("form", [name for name, form in FORMS.items() if form.opening])
def test_free_text_with_strict_tools(form: str) -> None:
    params = parse(form, tools=[STRICT, NOW]).requests[0].params
    assert params.grammar is not None
    for text in ("", "Hello { you } <b>", enforced(form, "weather", ULM)):
        assert matches(params.grammar, text), text
    assert matches(params.grammar, "Well. " + enforced(form, "now", '{"any": 1}'))
    assert not matches(params.grammar, enforced(form, "weather", '{"city": 1}'))
    assert not matches(params.grammar, enforced(form, "other", "{}"))


def test_strict_tools_need_calls_that_can_be_told_from_text() -> None:
    with pytest.raises(UserError, match="strict tools need tool_choice required") as caught:
        parse("pythonic", tools=[STRICT])
    assert caught.value.field == "tools"


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "allowed_tools": {"mode": "never", "tools": [NOW]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"x": 1}]}},
    ],
)
def test_bad_subsets(choice: Any) -> None:
    with pytest.raises(UserError) as caught:
        parse(tools=[WEATHER, NOW], tool_choice=choice)
    assert caught.value.field == "tool_choice"


def test_marks_are_special_tokens_where_there_are_such() -> None:
    grammar = f"start: {quote_mark('<a>')} x\nx: {text_before_mark('</a/>')}"
    assert Marks({"<a>": 7}).resolve(grammar) == ("start: <[7]> x\nx[lazy]: /(.|\\n)*<\\/a\\/>/")
    assert Marks({"</a/>": 8}).resolve(grammar) == 'start: "<a>" x\nx: /(.|\\n)*/ <[8]>'
    assert Marks({}).resolve('start: "x"') == 'start: "x"'


def test_a_budget_for_reasoning() -> None:
    [request] = parse(reasoning="deepseek_r1", thinking_token_budget=5).requests
    assert request.params.thinking == ThinkingBudget(
        num_tokens=5, begin="<think>", end="</think>", is_open=True
    )
    hinted = {"chat_template_kwargs": {"thinking_budget": 3}}
    [request] = parse(reasoning="qwen3", **hinted).requests
    assert request.params.thinking is not None
    assert (request.params.thinking.num_tokens, request.params.thinking.is_hint) == (3, True)
    assert parse(**hinted).requests[0].params.thinking is None
    for fields in ({"chat_template_kwargs": {"thinking_budget": -1}}, {}):
        assert parse(reasoning="qwen3", **fields).requests[0].params.thinking is None
    for fields in ({}, {"reasoning": "qwen3"}):
        with pytest.raises(UserError, match="thinking_token_budget") as caught:
            parse(thinking_token_budget=-1 if fields else 1, **fields)
        assert caught.value.field == "thinking_token_budget"


def test_special_tokens_that_parsers_need_are_text() -> None:
    tokenizer = Tokenizer(byte_level(), {})
    ids = [tokenizer.token_id("<s>"), *tokenizer.encode_now("a", add_special_tokens=False)]
    for kept, expected in (((), "a"), (("<s>",), "<s>a"), (("</s>", "<none>"), "a")):
        detokenizer = tokenizer.detokenizer(kept=kept)
        assert "".join(detokenizer.push(i) for i in ids if i is not None) == expected


def template_of(*argv: str) -> ChatTemplate:
    deployment = resolve([str(MODEL_DIR), *argv], {"LMI_CACHE_DIR": ""})
    recipe = recipe_of(deployment.models[0], deployment.server)

    async def open_model() -> ChatTemplate:
        opened = await recipe.open(Metrics().observer("m"))
        assert opened.options.chat_template is not None
        return opened.options.chat_template

    return asyncio.run(open_model())


def test_configured_parsers() -> None:
    usual = template_of()
    assert (usual.tool_form.name, usual.reasoning) == ("hermes", None)
    template = template_of("--tool-call-parser", "pythonic", "--reasoning-parser", "granite")
    assert template.tool_form is form_named("pythonic")
    assert template.reasoning is REASONING["granite"]
    thinks = "chat_template={{ messages }}{{ '<think>' }}{{ '</think>' }}"
    for value, is_split in (("true", True), ("false", False)):
        template = template_of("-o", thinks, "-o", f"enable_reasoning={value}")
        assert (template.reasoning is not None) is is_split
    for flag in ("--tool-call-parser", "--reasoning-parser"):
        with pytest.raises(ConfigError, match=r"mistral.*or leave it out"):
            template_of(flag, "nonsense")


def test_auto_choice_off() -> None:
    template = template_of("--no-enable-auto-tool-choice")
    assert not template.auto_tools
    assert template_of("--enable-auto-tool-choice").auto_tools
    model = model_of(chat_template=template)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Go"}], "tools": [WEATHER]}
    for choice in (None, "auto"):
        call = Call(request_id="r", body=json.dumps({**body, "tool_choice": choice}).encode())
        with pytest.raises(UserError, match='"auto" tool choice requires') as caught:
            parse_chat(model, call)
        assert caught.value.field == "tool_choice"
    for choice in ("none", "required", WEATHER):
        call = Call(request_id="r", body=json.dumps({**body, "tool_choice": choice}).encode())
        assert parse_chat(model, call).requests


def test_the_options_name_every_parser() -> None:
    assert set(TOOL_FORMS) == {*FORMS, *ALIASES}
    assert set(REASONING_FORMS) == set(REASONING)


def test_reasoning_can_be_left_in_the_content() -> None:
    shown = "{{ '<think>' }}{{ '</think>' }}"
    assert ChatTemplate({"default": shown}).reasoning is REASONING["qwen3"]
    assert ChatTemplate({"default": shown}, reasoning="none").reasoning is None
