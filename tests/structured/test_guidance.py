"""llguidance behind the interface: what may come next, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from lmi_core.demo import MODEL_DIR
from lmi_core.errors import UserError
from lmi_core.structured import guidance
from lmi_core.structured.allowed_tokens import AllowedTokens
from lmi_core.structured.grammar import MAX_GRAMMAR_CHARS, Grammar
from lmi_core.structured.guidance import GuidanceLibrary
from lmi_core.structured.matcher import CompiledGrammar, Matcher
from lmi_core.structured.size import MAX_CHOICES
from lmi_core.text.tokenizer import Tokenizer
from tests.text.tokenizers_for_tests import byte_fallback, byte_level

DEMO = Tokenizer.load(MODEL_DIR)
EOS_ID = 5
VOCAB_SIZE = DEMO.num_tokens + 7
"""As of a model whose embedding is larger than its tokenizer."""
LIBRARY = GuidanceLibrary(DEMO, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS_ID, 4])


def allowed(matcher: Matcher, vocab_size: int = VOCAB_SIZE) -> set[int]:
    mask = np.zeros((vocab_size + 31) // 32, np.uint32)
    matcher.fill_mask(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not bits[vocab_size:].any()
    return set(np.flatnonzero(bits).tolist())


def write(matcher: Matcher, num_tokens: int) -> None:
    """Take the first token that may come, again and again."""
    for _ in range(num_tokens):
        matcher.accept(min(allowed(matcher) - {EOS_ID}))


def matches(grammar: Grammar, text: str) -> bool:
    """Whether the whole text follows the grammar, one token after the other."""
    matcher = LIBRARY.compile(grammar).matcher()
    for token_id in DEMO.encode_now(text, add_special_tokens=False):
        if token_id not in allowed(matcher):
            return False
        matcher.accept(token_id)
    return EOS_ID in allowed(matcher)


def test_every_text_has_the_first_mask_of_its_grammar() -> None:
    compiled = LIBRARY.compile(Grammar.regex("[a-c][0-9]"))
    expected = allowed(compiled.matcher())
    matcher = compiled.matcher()
    matcher.accept(min(expected))
    after = allowed(matcher)
    matcher.rollback(1)
    assert allowed(matcher) == expected != after


OBJECT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1},
        "inner": {"type": "object", "properties": {"x": {"type": ["integer", "null"]}}},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar.regex("[a-c]{2,3}"), ["ab", "abc"], ["a", "abcd", "xy"]),
        (Grammar.regex("^[0-9]+$"), ["1", "123"], ["", "1a"]),
        (Grammar.choice(["yes", "no", 'a "b"\n']), ["yes", 'a "b"\n'], ["y", "maybe", ""]),
        (Grammar.json_object(), ["{}", '{"a": [1, null]}'], ["[]", "1", "{'a': 1}"]),
        (
            Grammar.json_schema(OBJECT),
            ['{"name":"bob","tags":["a","b"]}', '{"name": "é", "tags": ["a"], "inner": {"x": 1}}'],
            ['{"name":"bob"}', '{"name":"bobbob","tags":["a"]}', '{"name":"b","tags":["c"]}'],
        ),
        (Grammar.json_schema(json.dumps({"type": "boolean"})), ["true"], ["1"]),
        (Grammar.context_free('start: "a" start "b" | "c"'), ["c", "aacbb"], ["ac", "b"]),
        (Grammar.context_free('root ::= "x" | root "y"'), ["x", "xyy"], ["y"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_languages(grammar: Grammar, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert matches(grammar, text), text
    for text in bad:
        assert not matches(grammar, text), text


def test_blanks_between_the_parts_of_json_do_not_go_on_for_ever() -> None:
    matcher = LIBRARY.compile(Grammar.json_object()).matcher()
    [brace] = DEMO.encode_now("{", add_special_tokens=False)
    [blank] = DEMO.encode_now(" ", add_special_tokens=False)
    matcher.accept(brace)
    matcher.accept(blank)
    texts = [DEMO.token_text(i) for i in allowed(matcher)]
    assert texts
    assert not any(text.startswith((" ", "\n", "\t")) for text in texts)


def test_a_complete_text_can_only_end() -> None:
    matcher = LIBRARY.compile(Grammar.regex("ab")).matcher()
    assert not matcher.is_complete
    for token_id in DEMO.encode_now("ab", add_special_tokens=False):
        matcher.accept(token_id)
    assert matcher.is_complete
    assert allowed(matcher) == {EOS_ID, 4}


def test_a_text_that_may_go_on_is_not_complete() -> None:
    matcher = LIBRARY.compile(Grammar.regex("a+")).matcher()
    matcher.accept(DEMO.encode_now("a", add_special_tokens=False)[0])
    assert not matcher.is_complete
    assert EOS_ID in allowed(matcher)
    assert len(allowed(matcher)) > 2


def test_special_tokens_are_no_text() -> None:
    matcher = LIBRARY.compile(Grammar.regex("(.|\n)*")).matcher()
    special = allowed(matcher) & DEMO.special_ids
    assert special <= {EOS_ID, 4}


def test_as_many_choices_as_are_taken_can_be_written() -> None:
    grammar = Grammar.choice([f"x{number}" for number in range(MAX_CHOICES)])
    assert matches(grammar, f"x{MAX_CHOICES - 1}")


def test_rollback_goes_back() -> None:
    matcher = LIBRARY.compile(Grammar.json_schema(OBJECT)).matcher()
    seen = []
    token_ids = DEMO.encode_now('{"name":"bob","tags":["a"]}', add_special_tokens=False)
    for token_id in token_ids:
        seen.append(allowed(matcher))
        matcher.accept(token_id)
    assert matcher.is_complete
    matcher.rollback(3)
    assert allowed(matcher) == seen[-3]
    for token_id in token_ids[-3:]:
        matcher.accept(token_id)
    assert matcher.is_complete


@pytest.mark.parametrize("banned", [None, 6])
def test_how_many_of_some_tokens_may_come(banned: int | None) -> None:
    compiled: CompiledGrammar = LIBRARY.compile(Grammar.json_schema(OBJECT))
    token_ids = DEMO.encode_now('{"name":"bob","tags":["c"]}', add_special_tokens=False)
    if banned is not None:
        others = [i for i in range(VOCAB_SIZE) if i != token_ids[banned]]
        compiled = AllowedTokens(others, VOCAB_SIZE, compiled)
    matcher = compiled.matcher()
    walked = compiled.matcher()
    expected = 0
    for token_id in token_ids:
        if token_id not in allowed(walked):
            break
        walked.accept(token_id)
        expected += 1
    assert 0 < expected < len(token_ids)
    before = allowed(matcher)
    assert matcher.num_allowed(token_ids) == expected
    assert matcher.num_allowed([]) == 0
    assert allowed(matcher) == before


@pytest.mark.parametrize("grammar", [Grammar.choice(["xab12"]), Grammar.regex("xab12+")])
@pytest.mark.parametrize("num_back", range(1, 6))
def test_rollback_goes_back_over_end_ids(grammar: Grammar, num_back: int) -> None:
    matcher = LIBRARY.compile(grammar).matcher()
    token_ids = [*DEMO.encode_now("xab12", add_special_tokens=False), EOS_ID]
    seen = []
    for token_id in token_ids:
        seen.append(allowed(matcher))
        matcher.accept(token_id)
    matcher.rollback(num_back)
    for token_id, before in list(zip(token_ids, seen, strict=True))[-num_back:]:
        assert allowed(matcher) == before
        matcher.accept(token_id)


def test_matchers_of_a_grammar_are_independent() -> None:
    compiled = LIBRARY.compile(Grammar.regex("ab"))
    first, second = compiled.matcher(), compiled.matcher()
    start = allowed(second)
    first.accept(DEMO.encode_now("a", add_special_tokens=False)[0])
    assert allowed(second) == start


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar.json_schema({"type": "objekt"}), "objekt"),
        (Grammar.json_schema('{"type":'), "grammar can't be used"),
        (Grammar.json_schema({"$ref": "#/nowhere"}), "nowhere"),
        (Grammar.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Grammar.json_schema({"type": "string", "format": "shoe size"}), "shoe size"),
        (Grammar.regex("[a"), "unclosed"),
        (Grammar.regex("(?=a)b"), "look-around"),
        (Grammar.context_free("start: a"), "unknown name"),
        (Grammar.json_schema({"enum": [{"k": i, "v": "x" * 9} for i in range(9000)]}), "limit"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_grammars_are_the_users_fault(grammar: Grammar, reason: str) -> None:
    tight = GuidanceLibrary(
        DEMO,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[EOS_ID],
        limits={"max_grammar_size": 20_000, "initial_lexer_fuel": 100_000},
    )
    with pytest.raises(UserError, match=reason) as caught:
        tight.compile(grammar)
    assert caught.value.field == "grammar"
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_long_grammars_are_refused_unread() -> None:
    with pytest.raises(UserError, match=f"at most {MAX_GRAMMAR_CHARS}"):
        Grammar.regex("a" * (MAX_GRAMMAR_CHARS + 1))


def test_deep_schemas_are_refused() -> None:
    schema: Any = {}
    for _ in range(200):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(UserError, match="recursion limit"):
        LIBRARY.compile(Grammar.json_schema(schema))
    for _ in range(200_000):
        schema = [schema]
    with pytest.raises(UserError, match="nested too deeply"):
        Grammar.json_schema(schema)
    while isinstance(schema, list):  # freed from the inside, without recursion
        [schema] = schema


def test_a_step_that_costs_too_much_fails_its_matcher() -> None:
    library = GuidanceLibrary(
        DEMO, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS_ID], limits={"step_lexer_fuel": 500}
    )
    matcher = library.compile(Grammar.regex("[0-9]{40}(.*a.{12}){1,40}b")).matcher()
    with pytest.raises(UserError, match="failed while generating"):
        write(matcher, num_tokens=200)


def test_processor_time_has_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(100))
    matcher = LIBRARY.compile(Grammar.regex("a*")).matcher()
    monkeypatch.setattr("time.thread_time", lambda: float(next(seconds)))
    with pytest.raises(UserError, match="processor time"):
        write(matcher, num_tokens=5)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_every_kind_of_tokenizer(make: Any) -> None:
    tokenizer = Tokenizer(make(), {})
    eos_id = max(tokenizer.special_ids)
    library = GuidanceLibrary(tokenizer, vocab_size=tokenizer.num_tokens, eos_token_ids=[eos_id])
    matcher = library.compile(Grammar.regex("[a-z ]+")).matcher()
    mask = allowed(matcher, tokenizer.num_tokens)
    assert len(mask) > 20
    for token_id in mask - {eos_id}:
        assert tokenizer.token_text(token_id).replace(" ", "a").isalpha()


def test_forced_tokens_are_those_that_must_come() -> None:
    matcher = LIBRARY.compile(Grammar.regex("[ab]; once upon a time, (x|y) there")).matcher()
    assert matcher.forced_tokens() == []
    first = min(allowed(matcher))
    behind = matcher.forced_tokens([first])
    assert matcher.forced_tokens() == []  # nothing was accepted
    matcher.accept(first)
    assert matcher.forced_tokens() == behind
    assert matcher.forced_tokens(behind) == []
    run = matcher.forced_tokens()
    assert DEMO.decode(run).strip() in "; once upon a time,"
    assert matcher.num_allowed(run) == len(run) > 2
    matcher.accept(run[0])
    assert matcher.forced_tokens() == run[1:]
    for token_id in run[1:]:
        matcher.accept(token_id)
    allowed(matcher)
    matcher.rollback(len(run) - 1)
    assert matcher.num_allowed(run[1:]) == len(run) - 1
    assert matcher.forced_tokens() == run[1:]


def test_what_looks_have_cost_too_much_waits_for_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = LIBRARY.compile(Grammar.regex("one two three[ab] four five")).matcher()
    monkeypatch.setattr(guidance, "_MOST_LOOKS_S", 0.0)
    run = matcher.forced_tokens()
    matcher._looks_s = -1.5 * guidance._TOKEN_LOOKS_S
    assert run
    for i, token_id in enumerate(run):
        assert matcher.forced_tokens() == run[i:]  # known
        assert matcher.num_allowed(run[i:]) == 0
        matcher.accept(token_id)
    assert matcher.forced_tokens() == []
    monkeypatch.undo()
    matcher.accept(min(allowed(matcher)))
    assert matcher.forced_tokens() != []


def test_a_long_constant_is_not_looked_through() -> None:
    matcher = LIBRARY.compile(Grammar.json_schema({"const": "x" * 9000})).matcher()
    for _ in range(2):
        assert matcher.forced_tokens() == []
        allowed(matcher)
