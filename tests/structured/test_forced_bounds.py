"""The first token of a text, and the last one where it is as long as it may be."""

from __future__ import annotations

import numpy as np

from lmi_core.structured.allowed_tokens import AllowedTokens
from lmi_core.structured.forced_bounds import ForcedBounds, ForcedBoundsMatcher

VOCAB_SIZE, BEGIN, END = 70, 9, 66
FREE = AllowedTokens([5, 6], VOCAB_SIZE, None)


def allowed(matcher: ForcedBoundsMatcher) -> list[int]:
    mask = np.zeros(-(-VOCAB_SIZE // 32), np.uint32)
    matcher.fill_mask(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    return np.flatnonzero(bits).tolist()


def test_the_last_token_is_forced_also_after_a_rollback() -> None:
    matcher = ForcedBounds(FREE, max_tokens=3, end_ids=[END]).matcher()
    for ids in ([5, 6, END], [6, 5, END]):
        assert matcher.num_allowed([*ids, 5]) == 3
        assert matcher.num_allowed([5, 5, 5]) == 2
        for token_id in ids[:2]:
            assert allowed(matcher) == [5, 6]
            matcher.accept(token_id)
        assert allowed(matcher) == [END]
        matcher.accept(END)
        matcher.rollback(3)


def test_without_a_grammar_the_others_are_free() -> None:
    matcher = ForcedBounds(None, max_tokens=2, end_ids=[END, 3]).matcher()
    assert allowed(matcher) == list(range(VOCAB_SIZE))
    assert matcher.num_allowed([9, 9]) == 1
    matcher.accept(9)
    assert allowed(matcher) == [3, END]


def test_the_first_token_is_forced_whatever_the_others_follow() -> None:
    matcher = ForcedBounds(FREE, max_tokens=4, begin_id=BEGIN, end_ids=[END]).matcher()
    assert matcher.num_allowed([5]) == 0
    for _ in range(2):
        assert matcher.num_allowed([BEGIN, 5, 6, END]) == 4
        assert matcher.num_allowed([BEGIN, BEGIN]) == 1
        assert allowed(matcher) == [BEGIN]
        matcher.accept(BEGIN)
        assert allowed(matcher) == [5, 6]
        matcher.accept(5)
        matcher.accept(6)
        assert allowed(matcher) == [END]
        matcher.rollback(3)


def test_a_first_token_alone_is_soon_done() -> None:
    matcher = ForcedBounds(None, max_tokens=1, begin_id=BEGIN).matcher()
    assert not matcher.is_spent
    assert allowed(matcher) == [BEGIN]
    matcher.accept(BEGIN)
    assert matcher.is_spent
    assert allowed(matcher) == list(range(VOCAB_SIZE))
    both = ForcedBounds(None, max_tokens=1, begin_id=BEGIN, end_ids=[END]).matcher()
    assert allowed(both) == [END]
