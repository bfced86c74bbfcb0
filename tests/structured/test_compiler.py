"""The cache of compiled grammars: once each, off the loop, failures stay where they are."""

from __future__ import annotations

import asyncio
import threading
import time
import tomllib
from pathlib import Path

import pytest

from lmi_core.errors import MissingExtraError, UserError
from lmi_core.structured import library as library_module
from lmi_core.structured.compiler import GrammarCompiler
from lmi_core.structured.grammar import Grammar
from lmi_core.structured.library import load_library
from lmi_core.structured.matcher import CompiledGrammar
from lmi_core.text.tokenizer import Tokenizer
from lmi_core.version import LEAST_LLGUIDANCE
from tests.engine.harness import byte_tokenizer, run
from tests.text.tokenizers_for_tests import word_piece


class FakeLibrary:
    def __init__(self) -> None:
        self.compiled: list[Grammar] = []
        self.release = threading.Event()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        if grammar.text == "slow":
            self.release.wait(10)
        self.compiled.append(grammar)
        return object()  # type: ignore[return-value]


def test_a_grammar_is_compiled_once_and_the_oldest_dropped() -> None:
    library = FakeLibrary()

    async def use() -> None:
        compiler = GrammarCompiler(lambda: library, max_cached=2)
        a, b, c = map(Grammar.regex, "abc")
        first = await compiler.compile(a)
        await compiler.compile(b)
        assert await compiler.compile(a) is first
        await compiler.compile(c)  # drops b, the least recent
        assert await compiler.compile(a) is first
        await compiler.compile(b)
        compiler.close()
        assert library.compiled == [a, b, c, b]

    run(use())


def test_those_who_come_together_share_one_compilation() -> None:
    """Also where the first of them leaves, and where it fails; nobody left: it is given up."""
    library = FakeLibrary()

    async def use() -> None:
        compiler = GrammarCompiler(lambda: library, timeout_s=0.2)
        slow = Grammar.regex("slow")
        first, *others = (asyncio.create_task(compiler.compile(slow)) for _ in range(20))
        await asyncio.sleep(0.01)
        first.cancel()
        library.release.set()
        assert len(set(await asyncio.gather(*others))) == 1
        assert library.compiled == [slow]
        library.release.clear()
        compiler = GrammarCompiler(lambda: library, timeout_s=0.05)
        both = (compiler.compile(slow), compiler.compile(slow))
        failed = await asyncio.gather(*both, return_exceptions=True)
        assert [type(error) for error in failed] == [UserError] * 2
        named = [Grammar.regex("slow", field=name) for name in ("guided_regex", "regex")]
        failed = await asyncio.gather(*map(compiler.compile, named), return_exceptions=True)
        assert [getattr(error, "field", None) for error in failed] == ["guided_regex", "regex"]
        left = asyncio.create_task(compiler.compile(slow))
        await asyncio.sleep(0.01)
        left.cancel()
        await asyncio.wait([left])
        library.release.set()
        assert await compiler.compile(slow)
        compiler.close()

    run(use())


def test_a_slow_grammar_times_out_while_others_are_compiled() -> None:
    library = FakeLibrary()

    async def use() -> None:
        compiler = GrammarCompiler(lambda: library, timeout_s=0.5)
        slow = asyncio.create_task(compiler.compile(Grammar.regex("slow")))
        await asyncio.sleep(0)
        started_s = time.monotonic()
        await compiler.compile(Grammar.regex("quick"))
        assert not slow.done() or time.monotonic() - started_s > 0.5
        with pytest.raises(UserError, match=r"couldn't be compiled within 0\.5 s"):
            await slow
        library.release.set()
        compiler.close()

    run(use())


def test_what_is_prepared_is_made_once_and_before_the_first_grammar() -> None:
    library, made = FakeLibrary(), []

    def make() -> FakeLibrary:
        made.append(threading.get_ident())
        return library

    async def use() -> None:
        compiler = GrammarCompiler(make)
        await asyncio.to_thread(compiler.prepare)
        assert len(made) == 1
        await compiler.compile(Grammar.regex("a"))
        compiler.close()
        assert len(made) == 1

    run(use())


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "is_installed", lambda: False)

    async def use() -> None:
        compiler = GrammarCompiler(
            lambda: load_library(byte_tokenizer(), vocab_size=256, eos_token_ids=[250])
        )
        compiler.prepare()
        for _ in range(2):
            with pytest.raises(MissingExtraError, match=r"pip install 'lmi-core\[structured\]'"):
                await compiler.compile(Grammar.regex("a"))
        compiler.close()

    run(use())


def test_a_model_without_an_end_is_refused() -> None:
    with pytest.raises(UserError, match="eos_token_id"):
        load_library(byte_tokenizer(), vocab_size=256, eos_token_ids=[])


def test_a_tokenizer_whose_tokens_have_no_text_of_their_own_is_refused() -> None:
    tokenizer = Tokenizer(word_piece(), {})
    with pytest.raises(UserError, match="stand for bytes"):
        load_library(tokenizer, vocab_size=tokenizer.num_tokens, eos_token_ids=[1])


def test_a_library_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "_version", lambda: "1.6.1")
    refused = r"llguidance 1\.6\.1 here is older than 1\.8.*pip install --upgrade 'lmi-core\[struct"
    with pytest.raises(UserError, match=refused):
        load_library(byte_tokenizer(), vocab_size=256, eos_token_ids=[0])


def test_the_extra_wants_the_library_that_is_checked() -> None:
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["structured"] == [f"llguidance>={'.'.join(map(str, LEAST_LLGUIDANCE))},<2"]
