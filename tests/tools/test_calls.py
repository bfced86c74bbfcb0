"""Tool calls in texts: whole, character by character, and what isn't one."""

from __future__ import annotations

import json
import random

import pytest

from lmi_core.tools.calls import CallArguments, CallStart, Content, ToolCallParser

NAMES = ("weather", "add")
Calls = list[tuple[str, str]]


def parse(pieces_of_text: list[str]) -> tuple[str, Calls]:
    """The content and the calls of a text that comes in pieces."""
    parser = ToolCallParser(NAMES)
    pieces = [piece for text in pieces_of_text for piece in parser.push(text)] + parser.flush()
    content, calls = "", []
    for piece in pieces:
        match piece:
            case Content(text):
                assert text
                content += text
            case CallStart(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, text):
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + text)
    assert parser.num_calls == len(calls)
    return content, calls


WEATHER = '{"name": "weather", "arguments": {"city": "Ulm \\"}{", "days": [1, {"a": 2}]}}'
ARGUMENTS = '{"city": "Ulm \\"}{", "days": [1, {"a": 2}]}'
CASES: list[tuple[str, str, Calls]] = [
    ("", "", []),
    ("Just text, no call.\n", "Just text, no call.\n", []),
    (f"<tool_call>\n{WEATHER}\n</tool_call>", "", [("weather", ARGUMENTS)]),
    (f"Let me see. <tool_call>{WEATHER}</tool_call>", "Let me see. ", [("weather", ARGUMENTS)]),
    (
        f'<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>{{"name":"add"}}</tool_call>\n',
        "",
        [("weather", ARGUMENTS), ("add", "{}")],
    ),
    (f"<tool_call>{WEATHER}</tool_call> Done.", "Done.", [("weather", ARGUMENTS)]),
    (f"<tool_call>{WEATHER}", "", [("weather", ARGUMENTS)]),
    (
        '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>',
        "",
        [("add", '{"a": 1}')],
    ),
    (
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("add", '{"a": 1}')],
    ),
    ('<tool_call>{"name": "other", "arguments": {}}</tool_call>', "", [("other", "{}")]),
    ('{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    ('\n{"type": "function", "name": "add", "parameters": {}}', "", [("add", "{}")]),
    ('<|python_tag|>{"name": "add", "parameters": {}}', "", [("add", "{}")]),
    (
        '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}',
        "",
        [("add", '{"a": 1}'), ("add", '{"a": 2}')],
    ),
    # Cut short: what is known is there, nothing is invented.
    ('<tool_call>{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1')]),
    ('<tool_call>{"name": "ad', '<tool_call>{"name": "ad', []),
    # Broken behind what is known: a call was announced, wherever the text was cut.
    ('<tool_call>{"name": "add", "arguments": "a", "\\x": 1}!', ": 1}!", [("add", "a")]),
    ('<tool_call>{"name": "add", "arguments": {}, "name": "x"}</tool_call>', "", [("add", "{}")]),
    # No calls.
    ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ('{"name": "add", "age": 3}', '{"name": "add", "age": 3}', []),
    ('{"a": 1} and more', '{"a": 1} and more', []),
    ('Text {"name": "add", "parameters": {}}', 'Text {"name": "add", "parameters": {}}', []),
    ("<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
    ("a <tool_ca", "a <tool_ca", []),
    ("1 < 2 <tool> x", "1 < 2 <tool> x", []),
    ("   ", "   ", []),
]


@pytest.mark.parametrize(("text", "content", "calls"), CASES, ids=lambda value: str(value)[:40])
def test_calls_whole_and_in_pieces(text: str, content: str, calls: Calls) -> None:
    assert parse([text]) == (content, calls)
    assert parse(list(text)) == (content, calls)
    rng = random.Random(text)
    for _ in range(30):
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(pieces) == (content, calls), pieces


def test_arguments_come_while_they_are_written() -> None:
    parser = ToolCallParser(NAMES)
    assert parser.push('<tool_call>{"name": "add", "arg') == []
    assert parser.push('uments": {"a": ') == [CallStart(0, "add"), CallArguments(0, '{"a": ')]
    assert parser.push("12") == [CallArguments(0, "12")]
    assert parser.push("}}\n</tool") == [CallArguments(0, "}")]
    assert parser.push("_call>") == []
    assert parser.flush() == []


def test_text_is_not_held_back_longer_than_needed() -> None:
    parser = ToolCallParser(NAMES)
    assert parser.push("Hello") == [Content("Hello")]
    assert parser.push(" <") == []
    assert parser.push("b> x ") == [Content(" <b> x")]
    assert parser.flush() == [Content(" ")]


def test_random_text_never_gets_lost() -> None:
    rng = random.Random(5)
    bits = ["<tool_call>", "</tool_call>", "{", "}", '"', "name", ":", " ", "x", "\\", WEATHER, "["]
    for _ in range(3000):
        text = "".join(rng.choice(bits) for _ in range(rng.randrange(12)))
        content, calls = parse([text])
        assert parse(list(text)) == (content, calls), text
        if not calls:
            assert content == text
        for name, arguments in calls:
            assert name in text
            if arguments == ARGUMENTS:
                json.loads(arguments)
