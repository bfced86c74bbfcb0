"""Every family's form of tool calls and of reasoning: whole, and however its text is split."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmi_core.tools.calls import CallArguments, CallStart, Content, Reasoning
from lmi_core.tools.forms import ALIASES, FORMS, form_named, form_shown
from lmi_core.tools.reader import TextParser
from lmi_core.tools.reasoning import HARMONY, REASONING, reasoning_shown

TOOLS = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "n": {}}},
    "add": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
Parsed = tuple[str, str, list[tuple[str, str]]]


def parsed(parser: TextParser, pieces_of_text: list[str]) -> Parsed:
    """Reasoning, content and calls."""
    pieces = [piece for text in pieces_of_text for piece in parser.push(text)] + parser.flush()
    reasoning, content, calls = "", "", []
    for piece in pieces:
        match piece:
            case Content(text):
                assert text
                content += text
            case Reasoning(text):
                assert text
                reasoning += text
            case CallStart(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, text):
                assert text
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + text)
    assert parser.num_calls == len(calls)
    return reasoning, content, calls


def make(form: str, reasoning: str | None = None, *, is_open: bool = False) -> TextParser:
    parses = [form_named(form).parse(False)]
    if reasoning is not None:
        parses.insert(0, REASONING[reasoning].parser(is_open=is_open))
    return TextParser(parses, TOOLS)


B = "\uff5c"
CITY = '{"city": "Ulm \\"}{<", "n": [1, {"a": 2}]}'
CASES: dict[str, list[tuple[str, str, list[tuple[str, str]]]]] = {
    "mistral": [
        (f'Hm. [TOOL_CALLS][{{"name": "weather", "arguments": {CITY}}}, {{"name": "add"}}]',
         "Hm. ", [("weather", CITY), ("add", "{}")]),
        (f"[TOOL_CALLS]weather[ARGS]{CITY}[TOOL_CALLS]add[CALL_ID]a1[ARGS]{{}}",
         "", [("weather", CITY), ("add", "{}")]),
        (f"[TOOL_CALLS] weather{CITY}", "", [("weather", CITY)]),
        ("[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", []),
        ("[TOOL_CALL", "[TOOL_CALL", []),
    ],
    "granite": [
        (f'<|tool_call|>[{{"name": "weather", "arguments": {CITY}}}]', "", [("weather", CITY)]),
        (f'So. <|tool_call|> {{"name": "weather", "arguments": {CITY}}}', "So. ",
         [("weather", CITY)]),
        ("<|tool_call|>[]", "<|tool_call|>[]", []),
    ],
    "jamba": [
        (f'<tool_calls>[\n  {{"name": "weather", "arguments": {CITY}}}\n]</tool_calls>\nDone.',
         "Done.", [("weather", CITY)]),
    ],
    "phi4_mini_json": [
        (f'functools[{{"name": "weather", "arguments": {CITY}}}]', "", [("weather", CITY)]),
        (f'<|tool_call|>[{{"name": "weather", "arguments": {CITY}}}]<|/tool_call|>', "",
         [("weather", CITY)]),
        ("The functools module", "The functools module", []),
    ],
    "cohere_command3": [
        (f'<|START_ACTION|>[\n{{"tool_call_id": "0", "tool_name": "weather", "parameters": {CITY}'
         '}\n]<|END_ACTION|>', "", [("weather", CITY)]),
    ],
    "internlm": [
        (f'I see.<|action_start|><|plugin|>\n{{"name": "weather", "parameters": {CITY}}}'
         "<|action_end|>\n", "I see.", [("weather", CITY)]),
    ],
    "deepseek_v3": [
        (f"<{B}tool▁calls▁begin{B}><{B}tool▁call▁begin{B}>function<{B}tool▁sep{B}>weather\n"
         f"```json\n{CITY}\n```<{B}tool▁call▁end{B}>\n<{B}tool▁call▁begin{B}>function"
         f"<{B}tool▁sep{B}>add\n```json\n{{}}\n```<{B}tool▁call▁end{B}><{B}tool▁calls▁end{B}>",
         "", [("weather", CITY), ("add", "{}")]),
        (f"<{B}tool▁call▁begin{B}>nothing<{B}tool▁call▁end{B}>",
         f"<{B}tool▁call▁begin{B}>nothing<{B}tool▁call▁end{B}>", []),
    ],
    "deepseek_v31": [
        (f"Wait.<{B}tool▁calls▁begin{B}><{B}tool▁call▁begin{B}>weather<{B}tool▁sep{B}>{CITY}"
         f"<{B}tool▁call▁end{B}><{B}tool▁calls▁end{B}>", "Wait.", [("weather", CITY)]),
    ],
    "kimi_k2": [
        ("<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
         f"<|tool_call_argument_begin|>{CITY}<|tool_call_end|><|tool_call_begin|>functions.add:1"
         "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
         "", [("weather", CITY), ("add", "{}")]),
    ],
    "glm45": [
        ("Well.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>7</arg_value>\n"
         "<arg_key>n</arg_key>\n<arg_value>[1, 2]</arg_value>\n</tool_call>\n<tool_call>add"
         "</tool_call>", "Well.\n", [("weather", '{"city": "7", "n": [1, 2]}'), ("add", "{}")]),
        ("<tool_call>add\n<arg_key>a</arg_key><arg_value>1", "", [("add", "")]),
    ],
    "qwen3_coder": [
        ("<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n<b>\n</parameter>\n"
         "<parameter=n>\n2\n</parameter>\n</function>\n</tool_call>", "",
         [("weather", '{"city": "Ulm\\n<b>", "n": 2}')]),
    ],
    "functiongemma": [
        ("<start_function_call>call:weather{city:<escape>Ulm, {x}<escape>,n:2}"
         "<end_function_call>", "", [("weather", '{"city": "Ulm, {x}", "n": 2}')]),
    ],
    "gemma": [
        ('Sure:\n```tool_code\nweather(city="U)\\"", n=[1, {"a": true}])\nadd(a=1)\n```\n',
         "Sure:\n", [("weather", '{"city": "U)\\"", "n": [1, {"a": true}]}'),
                     ("add", '{"a": 1}')]),
        ("```tool_code\nprint(1)\n```", "```tool_code\nprint(1)\n```", []),
    ],
    "llama4_pythonic": [
        ("[weather(city='Ulm', n=None), add(a=-1)]", "",
         [("weather", '{"city": "Ulm", "n": null}'), ("add", '{"a": -1}')]),
        ("<|python_start|>[add(a=1)]<|python_end|>", "", [("add", '{"a": 1}')]),
        ('<|python_start|>{"name": "add", "parameters": {"a": 1}}<|python_end|>', "",
         [("add", '{"a": 1}')]),
        ("[1] says so", "[1] says so", []),
        ("[other(a=1)]", "[other(a=1)]", []),
        ("[add(1)]", "[add(1)]", []),
        ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ],
    "openai": [
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
         f"to=functions.weather <|constrain|>json<|message|>{CITY}<|call|>", "",
         [("weather", CITY)]),
        ("<|start|>assistant<|channel|>final<|message|>Hello.<|return|>", "Hello.", []),
        ("Plain.", "Plain.", []),
    ],
    "hermes": [
        (f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>', "",
         [("weather", CITY)]),
    ],
    "llama3_json": [
        (f'{{"name": "weather", "parameters": {CITY}}}', "", [("weather", CITY)]),
    ],
}  # fmt: skip
ALL = [(form, *case) for form, cases in CASES.items() for case in cases]


def test_every_form_has_a_case() -> None:
    assert set(CASES) == set(FORMS)
    assert set(ALIASES.values()) <= set(FORMS)


@pytest.mark.parametrize(("form", "text", "content", "calls"), ALL)
def test_calls(form: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parsed(make(form), [text])[1:] == (content, calls)


def splits(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("reasoning", [None, "qwen3", "granite"])
@pytest.mark.parametrize("form", FORMS)
def test_any_split_and_any_text(form: str, reasoning: str | None) -> None:
    """Marks, pieces of cases and noise in any order, cut anywhere: no split changes anything."""
    rng = random.Random(f"{form}{reasoning}")
    texts = [text for text, _, _ in CASES[form]]
    bits = [*form_named(form).marks, *texts, "{", "}", '"', "[", "]", " ", "\n", "x", "\\", "("]
    written = form_named(form).written
    bits += [written.begin, written.head_of("add"), written.tail, written.end, ",", ":", "\\u"]
    bits += ['{"name": "add"', '"name": "weather"', '"arguments": "{', '"parameters": {', '"x"']
    if reasoning is not None:
        bits += REASONING[reasoning].marks
    for number in range(400):
        text = "".join(rng.choice(bits) for _ in range(rng.randrange(9)))
        text = text[: rng.randrange(len(text) + 1)] if number % 2 else text
        is_open = rng.random() < 0.5
        whole = parsed(make(form, reasoning, is_open=is_open), [text])
        for pieces in (list(text), splits(text, rng)):
            assert parsed(make(form, reasoning, is_open=is_open), pieces) == whole, (text, pieces)


@settings(max_examples=60)
@given(text=st.text(max_size=60), seed=st.integers(0, 9))
@pytest.mark.parametrize("form", FORMS)
def test_text_without_marks_is_content(form: str, text: str, seed: int) -> None:
    for char in "<[`{":
        text = text.replace(char, "")
    text = text.replace("functools", "")
    assert parsed(make(form), splits(text, random.Random(seed))) == ("", text, [])


@pytest.mark.parametrize("name", sorted(set(REASONING) - {HARMONY}))
def test_reasoning(name: str) -> None:
    form = REASONING[name]
    calls = 'Yes. <tool_call>{"name": "add"}</tool_call>'
    begun = f"{form.begin}\nLet me <see>.\n{form.end}\n\n{calls}"
    expected = ("Let me <see>.", "Yes. ", [("add", "{}")])
    for text, is_open in ((begun, False), (begun, True), (begun.removeprefix(form.begin), True)):
        assert parsed(make("hermes", name, is_open=is_open), [text]) == expected
        assert parsed(make("hermes", name, is_open=is_open), list(text)) == expected
    assert parsed(make("hermes", name), [calls]) == ("", "Yes. ", [("add", "{}")])
    cut = f"{form.begin}Only this"
    assert parsed(make("hermes", name), list(cut)) == ("Only this", "", [])


def test_harmonys_channels() -> None:
    text = CASES["openai"][0][0]
    assert parsed(make("openai"), list(text))[0] == "Hm."


def test_where_reasoning_begins() -> None:
    qwen, deepseek = REASONING["qwen3"], REASONING["deepseek_r1"]
    assert qwen.is_open_after("assistant\n<think>\n")
    assert not qwen.is_open_after("assistant\n")
    assert not qwen.is_open_after("assistant\n<think>\n\n</think>\n\n")
    assert deepseek.is_open_after("Assistant:")
    assert not deepseek.is_open_after("Assistant:</think>")


def test_what_templates_show() -> None:
    for name, form in FORMS.items():
        if name == "llama3_json" or (name != "hermes" and form.written == FORMS["hermes"].written):
            continue
        written = form.written
        assert form_shown("{{ x }}" + written.begin + written.head + written.end).name == name
    for text, name in (
        ("<tool_call>\n<function=a>\n<parameter=b>", "qwen3_coder"),
        ("<tool_call>{{ n }}\n<arg_key>", "glm45"),
        ("python_tag", "llama3_json"),
        ("<|python_start|>", "llama4_pythonic"),
        ("<start_function_call>call:", "functiongemma"),
        ("nothing", "hermes"),
    ):
        assert form_shown(text).name == name
    assert reasoning_shown("{% if '</think>' in content %}") == "qwen3"
    assert reasoning_shown("nothing") is None


def test_arguments_are_shown_while_they_come() -> None:
    parser = make("mistral")
    assert parser.push("[TOOL_CALLS]add[ARGS]") == []
    assert parser.push('{"a": 1') == [CallStart(0, "add"), CallArguments(0, '{"a": 1')]
    assert parser.push("2}") == [CallArguments(0, "2}")]


@pytest.mark.parametrize("form", FORMS)
def test_complete_arguments_are_json(form: str) -> None:
    for text, _, calls in CASES[form]:
        for name, arguments in parsed(make(form), [text])[2]:
            assert (name, arguments) in calls
            if arguments:
                json.loads(arguments)


def test_hostile_depth_is_text() -> None:
    for text in ("[add(a=" + "[" * 5000 + "]" * 5000 + ")]", "[add(a=" + "-" * 5000 + "1)]"):
        assert parsed(make("pythonic"), [text]) == ("", text, [])
