"""Incremental detokenization: the pieces joined are the decoded whole, and no half characters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from lmi_core.text.detokenizer import ByteDetokenizer, WindowDetokenizer
from lmi_core.text.tokenizer import Tokenizer
from tests.text.tokenizers_for_tests import byte_fallback, byte_level, word_piece

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def pieces(
    tokenizer: Tokenizer, ids: list[int], *, skip: bool = True, context: tuple[int, ...] = ()
) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip, context=context)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@given(ids=st.lists(st.integers(0, 401), max_size=40), skip=st.booleans())
def test_byte_level_equals_decode_of_any_ids(ids: list[int], skip: bool) -> None:
    tokenizer = Tokenizer(byte_level(), {})
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces(tokenizer, ids, skip=skip)) == expected


@given(text=st.text(max_size=40))
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_valid_text_never_shows_half_a_character(make: object, text: str) -> None:
    tokenizer = Tokenizer(byte_level() if make is byte_level else byte_fallback(), {})
    text = text.replace(REPLACEMENT, "").replace("▁", "")
    ids = tokenizer.encode_now(text, add_special_tokens=False)
    shown = pieces(tokenizer, ids)
    assert "".join(shown) == (text if make is byte_level or not text else " " + text)
    assert all(REPLACEMENT not in piece for piece in shown)
    assert shown[-1] == ""


@given(text=st.text(max_size=30))
def test_the_window_agrees_with_the_bytes(text: str) -> None:
    tokenizer = Tokenizer(byte_level(), {})
    ids = tokenizer.encode_now(text.replace(REPLACEMENT, ""), add_special_tokens=False)
    window = WindowDetokenizer(lambda ids: tokenizer.decode(ids), frozenset())
    shown = [*(window.push(token_id) for token_id in ids), window.flush()]
    assert "".join(shown) == "".join(pieces(tokenizer, ids))
    assert all(REPLACEMENT not in piece for piece in shown)


@given(ids=st.lists(st.integers(1, 11), max_size=30))
def test_decoders_that_look_at_neighbours(ids: list[int]) -> None:
    tokenizer = Tokenizer(word_piece(), {})
    assert isinstance(tokenizer.detokenizer(), WindowDetokenizer)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)
    context = (1, 2)
    joined = tokenizer.decode(context) + "".join(pieces(tokenizer, ids, context=context))
    assert joined == tokenizer.decode([*context, *ids])


def test_half_a_character_at_the_end_becomes_one_replacement() -> None:
    for make in (byte_level, byte_fallback):
        tokenizer = Tokenizer(make(), {})
        ids = tokenizer.encode_now("🎲", add_special_tokens=False)
        half = ids[:-1]
        shown = pieces(tokenizer, half)
        assert "".join(shown[:-1]).strip() == ""
        assert shown[-1] == REPLACEMENT


def test_special_tokens_are_shown_only_when_asked_for() -> None:
    tokenizer = Tokenizer(byte_level(), {})
    ids = tokenizer.encode_now("a")
    assert "".join(pieces(tokenizer, ids)) == "a"
    assert "".join(pieces(tokenizer, ids, skip=False)) == "<s>a"


def test_a_long_run_without_a_character_is_shown_in_the_end() -> None:
    tokenizer = Tokenizer(byte_level(), {})
    [half] = [i for i in range(400) if tokenizer.token_text(i) == REPLACEMENT][:1]
    window = WindowDetokenizer(lambda ids: tokenizer.decode(ids), frozenset())
    shown = [window.push(half) for _ in range(40)]
    assert any(shown)


def test_costs_tens_of_microseconds_per_32_tokens() -> None:
    tokenizer = Tokenizer(byte_level(), {})
    detokenizer = tokenizer.detokenizer()
    assert isinstance(detokenizer, ByteDetokenizer)
    ids = tokenizer.encode_now("the quick brown fox " * 800)
    for token_id in set(ids):
        detokenizer.push(token_id)
    seconds = []
    for start in range(0, 3200, 32):
        before = time.perf_counter()
        for token_id in ids[start : start + 32]:
            detokenizer.push(token_id)
        seconds.append(time.perf_counter() - before)
    assert sorted(seconds)[len(seconds) // 2] < 200e-6


def test_token_texts_of_unknown_and_partial_tokens() -> None:
    tokenizer = Tokenizer(byte_level(), {})
    assert isinstance(byte_level(), tokenizers.Tokenizer)
    assert tokenizer.token_text(100_000) == ""
    assert tokenizer.token_text(0) == "<s>"


def test_long_contexts_are_decoded_from_their_end() -> None:
    """What a decoder makes of a token may depend on those before it; of many, on the last ones."""
    decoded: list[list[int]] = []

    def decode(ids: Sequence[int]) -> str:
        decoded.append(list(ids))
        return "".join(f"{before}>{token} " for before, token in pairwise([-1, *ids]))

    context = list(range(100, 140))
    window = WindowDetokenizer(decode, frozenset(), context)
    assert [window.push(1), window.push(2)] == ["139>1 ", "1>2 "]
    assert decoded[0] == context[-6:]
    assert max(map(len, decoded)) == 7
