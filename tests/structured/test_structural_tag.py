"""Structural tags: which texts they let through, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tokenizers

from lmi_core.errors import UserError
from lmi_core.structured.guidance import GuidanceLibrary
from lmi_core.structured.structural_tag import structural_tag
from lmi_core.text.tokenizer import Tokenizer
from tests.text.tokenizers_for_tests import byte_level

ONE = {"type": "const_string", "value": "1;"}
NUMBER = {"type": "regex", "pattern": "[0-9]+"}
OBJECT = {"type": "json_schema", "json_schema": {"type": "object", "maxProperties": 0}}
TAG_A = {"type": "tag", "begin": "<f=a>", "content": OBJECT, "end": "</f>"}
TAG_B = {"type": "tag", "begin": "<f=b>", "content": NUMBER, "end": "</f>"}
SEPARATED = {"type": "tags_with_separator", "tags": [TAG_B], "separator": ";"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": [TAG_A, TAG_B]}
OLDER = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=a>", "schema": {"maxProperties": 0, "type": "object"}, "end": "!"}
    ],
    "triggers": ["<f="],
}


def tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(byte_level().to_str())
    backend.add_special_tokens(["<|call|>"])
    return Tokenizer(backend, {})


TOKENIZER = tokenizer()
LIBRARY = GuidanceLibrary(TOKENIZER, vocab_size=TOKENIZER.num_tokens, eos_token_ids=[1])


def matches(tag: Any, text: str) -> bool:
    matcher = LIBRARY.compile(structural_tag(tag, field="f")).matcher()
    mask = np.zeros(-(-TOKENIZER.num_tokens // 32), np.uint32)
    for token_id in [*TOKENIZER.encode_now(text, add_special_tokens=False), 1]:
        matcher.fill_mask(mask)
        if not int(mask[token_id >> 5]) >> (token_id & 31) & 1:
            return False
        matcher.accept(token_id)
    return True


@pytest.mark.parametrize(
    ("tag", "good", "bad"),
    [
        ({"type": "const_string", "value": "a\n/b"}, ["a\n/b"], ["a", "a\n/bc"]),
        (OBJECT, ["{}", "{ }"], ["", "[]", '{"a":1}']),
        (NUMBER, ["1", "12"], ["", "1a"]),
        ({"type": "grammar", "grammar": 'root ::= "x" | root "y"'}, ["xyy"], ["y"]),
        ({"type": "grammar", "grammar": 'start: "x" "y"*'}, ["xyy"], ["y"]),
        ({"type": "any_text"}, ["", "what\never"], ["a<|call|>"]),
        (TAG_B, ["<f=b>12</f>"], ["<f=b></f>", "<f=b>1</f>2"]),
        ({**TAG_B, "content": {"type": "any_text"}}, ["<f=b>a<b</f>"], ["<f=b></f></f>"]),
        ({**TAG_B, "end": ["</f>", "."]}, ["<f=b>1.", "<f=b>1</f>"], ["<f=b>1"]),
        (
            {"type": "sequence", "elements": [NUMBER, ONE, TAG_A]},
            ["51;<f=a>{}</f>", "11;<f=a>{}</f>"],
            ["5;<f=a>{}</f>", "51;"],
        ),
        (
            {"type": "sequence", "elements": [{"type": "any_text"}, TAG_A, {"type": "any_text"}]},
            ["<f=a>{}</f>", "Hm. <f=a>{}</f> So."],
            ["Hm."],
        ),
        ({"type": "or", "elements": [NUMBER, TAG_A]}, ["7", "<f=a>{}</f>"], ["<f=a>7</f>"]),
        (TRIGGERED, ["", "a < b", "x<f=a>{}</f>y<f=b>1</f>"], ["<f=c>", "<f=a>1</f>"]),
        ({**TRIGGERED, "stop_after_first": True}, ["", "x<f=b>1</f>"], ["<f=b>1</f>x"]),
        ({**TRIGGERED, "at_least_one": True}, ["<f=b>1</f>x<f=a>{}</f>"], ["", "x"]),
        (
            {**TRIGGERED, "at_least_one": True, "stop_after_first": True},
            ["<f=b>1</f>"],
            ["", "x<f=b>1</f>", "<f=b>1</f>x"],
        ),
        (
            {"type": "tags_with_separator", "tags": [TAG_A, TAG_B], "separator": ", "},
            ["", "<f=b>1</f>, <f=a>{}</f>"],
            ["<f=b>1</f>,", "x"],
        ),
        (
            {**SEPARATED, "at_least_one": True},
            ["<f=b>1</f>;<f=b>1</f>"],
            [""],
        ),
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
def test_formats(tag: Any, good: list[str], bad: list[str]) -> None:
    whole = {"type": "structural_tag", "format": tag}
    assert [text for text in good if not matches(whole, text)] == []
    assert [text for text in bad if matches(whole, text)] == []
    assert all(matches(json.dumps(whole), text) for text in good)


def test_special_tokens_are_told_from_their_text() -> None:
    tag = {"type": "tag", "begin": "go <|call|>", "content": OBJECT, "end": "<|call|>."}
    whole = {"format": {"type": "sequence", "elements": [{"type": "any_text"}, tag]}}
    assert matches(whole, "I go go <|call|>{}<|call|>.")
    assert not matches(whole, "I go <|call|>{}")
    assert not matches(whole, "I <|call|>{}<|call|>.")
    triggered = {**TRIGGERED, "triggers": ["<|call|>"], "tags": [{**tag, "begin": "<|call|>"}]}
    assert matches({"format": triggered}, "Hm <|call|>{}<|call|>. So <|call|>{}<|call|>.")
    assert not matches({"format": triggered}, "Hm <|call|>")


def test_the_older_form() -> None:
    assert matches(OLDER, "Hm.")
    assert matches(OLDER, "Hm <f=a>{}! And <f=a>{}!")
    assert not matches(OLDER, "<f=a>{}")
    assert not matches(OLDER, "<f=b>")


DEEP: Any = {"type": "any_text"}
for _ in range(40):
    DEEP = {"type": "or", "elements": [DEEP]}


@pytest.mark.parametrize(
    ("tag", "said"),
    [
        ("{", "f isn't JSON"),
        (3, "f must be an object"),
        ({}, "f.format must be an object whose type is const_string"),
        ({"format": {"type": "qwen_xml_parameter"}}, "got 'qwen_xml_parameter'"),
        ({"format": {"type": "regex"}}, "f.format.pattern must be a text"),
        ({"format": {"type": "or", "elements": []}}, "f.format.elements must be a list"),
        ({"format": {**TAG_A, "end": 3}}, "f.format.end must be a text"),
        ({"format": {"type": "any_text", "excludes": ["x"]}}, "f.format.excludes is not available"),
        ({"format": {**TRIGGERED, "triggers": ["<g="]}}, "f.format.tags[0].begin must be a text"),
        ({**OLDER, "structures": [3]}, 'f.structures[0] must be an object with "begin"'),
        ({"format": DEEP}, "nested more than"),
        (
            {"format": {"type": "sequence", "elements": [TRIGGERED, TAG_A]}},
            "f.format.elements[0] may end with any text",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refusals(tag: Any, said: str) -> None:
    with pytest.raises(UserError) as refusal:
        structural_tag(tag, field="f")
    assert said in str(refusal.value)
    assert refusal.value.field == "f"


def test_what_the_library_refuses_is_named() -> None:
    tag = {"format": {"type": "json_schema", "json_schema": {"not": {"type": "string"}}}}
    with pytest.raises(UserError, match=r"f can't be used: .*not"):
        LIBRARY.compile(structural_tag(tag, field="f"))
