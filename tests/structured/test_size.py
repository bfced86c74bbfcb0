"""Grammars that would take too long are refused: by their size, or by compiling them in a child."""

from __future__ import annotations

import json

import pytest

from lmi_core.errors import UserError
from lmi_core.sandbox.pool import Limits
from lmi_core.structured import compiler as compiler_module
from lmi_core.structured.compiler import GrammarCompiler
from lmi_core.structured.grammar import Grammar
from lmi_core.structured.matcher import CompiledGrammar
from lmi_core.structured.size import check_size, repeated_size
from tests.engine.harness import run


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("abc", 3),
        ("(a{1000}){1000}", 1_000_000),
        ("a{3,5}b", 6),
        ("a{,7}|b{5,}", 13),
        ("(ab|c){2}", 8),
        (r"\{3}\(x{2}", 6),
        ("[{(]{3}", 3),
        ("[]a]{2}[^]a]{2}", 4),
        ("((a{10}b){10}){10}", 1100),
        ("){3}((", 3),
        (r"\d{3}-\d{4}", 8),
        ("a{99999999999999999999}", 999_999_999),
    ],
)
def test_repetitions_written_out(pattern: str, size: int) -> None:
    assert repeated_size(pattern)[0] == size


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", ["(a{2}", "[", "{", "{1", "\\", '"', '"{1', "[{1}"])
def test_it_is_linear(text: str) -> None:
    repeated_size(text * 60_000)
    check_size(Grammar.json_schema(text * 50_000 + "{1"))


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar.regex("x(a{1000}){1000}"), "x(a{1000}){1000}' has 1000001 characters with its"),
        (Grammar.json_schema({"type": "string", "pattern": "(a{300}){300}"}), "90002 characters"),
        (Grammar.regex("x((a{100})b{2}){99}"), "10099 characters with its repetitions written out"),
        (Grammar.regex(".{1,40001}"), "at most 40000 are allowed"),
        (Grammar.lark('start: (("a"){300}){300}'), "characters with its repetitions"),
        (Grammar.choice(["x"] * 1991), "grammar has 1991 choices; at most 1990 are allowed"),
    ],
)
def test_what_is_refused(grammar: Grammar, words: str) -> None:
    with pytest.raises(UserError) as caught:
        check_size(grammar)
    assert words in str(caught.value)
    assert caught.value.field == "grammar"


def test_what_is_not() -> None:
    for grammar in (
        Grammar.regex("(a{100}){100}"),
        Grammar.regex(".{1,40000}"),
        Grammar.regex("((ab){2000})(cd){9}a{2000}"),
        Grammar.json_schema({"pattern": "^[a-z]{1,5000}$", "maxLength": 10**9}),
        Grammar.choice(["x"] * 1990),
    ):
        check_size(grammar)


class Library:
    """Takes what it is given."""

    def __init__(self) -> None:
        self.compiled: list[Grammar] = []

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        self.compiled.append(grammar)
        return object()  # type: ignore[return-value]


def test_a_long_grammar_is_compiled_in_a_child_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """There it is ended when it takes too long, and refused as it would be here."""
    limits = Limits(what="compiling grammar", field="grammar", processor_s=1)
    monkeypatch.setattr(compiler_module, "_limits", lambda grammar: limits)
    library = Library()

    def schema(num_properties: int) -> Grammar:
        names = [f"k{i}" for i in range(num_properties)]
        return Grammar.json_schema({"properties": {name: {"type": "string"} for name in names}})

    async def main() -> None:
        compiler = GrammarCompiler(lambda: library)
        await compiler.compile(schema(300))
        with pytest.raises(UserError, match="takes more than 1 s of processor time"):
            await compiler.compile(schema(9000))
        with pytest.raises(UserError, match="grammar can't be used"):
            await compiler.compile(Grammar.json_schema(json.dumps({"type": "no" * 4000})))
        compiler.close()

    run(main())
    assert library.compiled == [schema(300)]
