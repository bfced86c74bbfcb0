"""The bound on tokens holds for every text, and isn't claimed where something could break it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

import lmi_core
from lmi_core.errors import UserError
from lmi_core.text.shortest_encoding import max_token_chars
from lmi_core.text.tokenizer import Tokenizer

DEMO = Path(lmi_core.__file__).parent / "demo" / "model"
TEXTS = st.text(st.sampled_from("ab \u2581é漢\n\x00<|begin|>"), max_size=60)


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2's: blanks become a character of their own, unknown ones their bytes."""
    vocabulary = {"<unk>": 0} | {f"<0x{value:02X}>": 1 + value for value in range(256)}
    for piece in ("\u2581", "a", "b", "ab", "\u2581ab", "\u2581\u2581"):
        vocabulary[piece] = len(vocabulary)
    merges = [("a", "b"), ("\u2581", "ab"), ("\u2581", "\u2581")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return backend


def byte_level() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def content(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    return json.loads(backend.to_str())  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_no_text_has_fewer_tokens(make: Any) -> None:
    tokenizer = Tokenizer(make(), {})
    longest = max_token_chars(content(make()))
    assert longest is not None

    @settings(max_examples=300)
    @given(text=st.one_of(TEXTS, st.text(max_size=40)))
    def holds(text: str) -> None:
        num_tokens = len(tokenizer.encode_now(text))
        assert num_tokens * longest >= len(text)
        tokenizer.refuse_longer(text, num_tokens)

    holds()
    with pytest.raises(UserError, match="the prompt has at least"):
        tokenizer.refuse_longer("a" * longest * 12, 10)
    tokenizer.refuse_longer("a" * longest * 10, 10)


def changed(**parts: Any) -> dict[str, Any]:
    return {**content(byte_fallback()), **parts}


def model(**values: Any) -> dict[str, Any]:
    return changed(model={**content(byte_fallback())["model"], **values})


def of(part: Any, name: str) -> dict[str, Any]:
    backend = byte_fallback()
    setattr(backend, name, part)
    return content(backend)


def with_added() -> dict[str, Any]:
    backend = byte_fallback()
    backend.add_tokens([AddedToken("<x>", lstrip=True)])
    return content(backend)


@pytest.mark.parametrize(
    "tokenizer",
    [
        of(normalizers.Strip(), "normalizer"),
        of(normalizers.Replace("ab", "a"), "normalizer"),
        of(normalizers.Sequence([normalizers.NFKC(), normalizers.Prepend("x")]), "normalizer"),
        of(pre_tokenizers.Whitespace(), "pre_tokenizer"),
        of(pre_tokenizers.Split(" ", "removed"), "pre_tokenizer"),
        model(byte_fallback=False),
        model(type="Unigram"),
        model(end_of_word_suffix="</w>"),
        model(vocab={"<unk>": 0, "a": 1}),
        with_added(),
    ],
)
def test_nothing_is_claimed_where_characters_may_be_lost(tokenizer: dict[str, Any]) -> None:
    assert max_token_chars(content(byte_fallback())) == 6
    assert max_token_chars(tokenizer) is None
