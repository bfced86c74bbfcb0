"""The last token of a text that is as long as it may be."""

from __future__ import annotations

import numpy as np

from lmi_core.structured.allowed_tokens import AllowedTokens
from lmi_core.structured.forced_end import ForcedEnd, ForcedEndMatcher

VOCAB_SIZE, END = 70, 66


def allowed(matcher: ForcedEndMatcher) -> list[int]:
    mask = np.zeros(-(-VOCAB_SIZE // 32), np.uint32)
    matcher.fill_mask(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    return np.flatnonzero(bits).tolist()


def test_the_last_token_is_forced_also_after_a_rollback() -> None:
    matcher = ForcedEnd(3, [END], AllowedTokens([5, 6], VOCAB_SIZE, None)).matcher()
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
    matcher = ForcedEnd(2, [END, 3], None).matcher()
    assert allowed(matcher) == list(range(VOCAB_SIZE))
    assert matcher.num_allowed([9, 9]) == 1
    matcher.accept(9)
    assert allowed(matcher) == [3, END]
