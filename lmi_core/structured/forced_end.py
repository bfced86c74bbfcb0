"""Text whose last token is the model's to say where it is as long as it may be (BART's, an end)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lmi_core.structured.matcher import CompiledGrammar, Mask, Matcher


class ForcedEnd:
    """Implements ``CompiledGrammar``."""

    def __init__(
        self, max_tokens: int, end_ids: Sequence[int], grammar: CompiledGrammar | None
    ) -> None:
        """``max_tokens``: of a text, whose last one is of ``end_ids`` then, whatever ``grammar``
        says, which the others follow."""
        self.max_tokens = max_tokens
        self.end_ids = tuple(end_ids)
        self._grammar = grammar

    def matcher(self) -> ForcedEndMatcher:
        return ForcedEndMatcher(self, None if self._grammar is None else self._grammar.matcher())


class ForcedEndMatcher:
    """Implements ``Matcher``."""

    def __init__(self, forced: ForcedEnd, inner: Matcher | None) -> None:
        self._forced = forced
        self._inner = inner
        self._num_tokens = 0

    def fill_mask(self, mask: Mask) -> None:
        if not self._num_left:
            mask[:] = 0
            for token_id in self._forced.end_ids:
                mask[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        elif self._inner is None:
            mask[:] = np.iinfo(np.uint32).max
        else:
            self._inner.fill_mask(mask)

    def accept(self, token_id: int) -> None:
        if self._inner is not None and self._num_left:
            self._inner.accept(token_id)
        self._num_tokens += 1

    def forced_tokens(self, behind: Sequence[int] = ()) -> list[int]:
        num_left = self._num_left - len(behind)
        if self._inner is None or num_left <= 0:
            return []
        return self._inner.forced_tokens(behind)[:num_left]

    def num_allowed(self, token_ids: list[int]) -> int:
        before, last = token_ids[: self._num_left], token_ids[self._num_left :]
        num_allowed = len(before) if self._inner is None else self._inner.num_allowed(before)
        if num_allowed < len(before) or not last:
            return num_allowed
        return num_allowed + (last[0] in self._forced.end_ids)

    def rollback(self, num_tokens: int) -> None:
        if self._inner is not None:
            num_behind = max(0, self._num_tokens - (self._forced.max_tokens - 1))
            self._inner.rollback(max(0, num_tokens - num_behind))
        self._num_tokens -= num_tokens

    @property
    def is_complete(self) -> bool:
        return self._inner is not None and self._inner.is_complete

    @property
    def is_spent(self) -> bool:
        return False

    @property
    def _num_left(self) -> int:
        """Tokens before the last one."""
        return max(0, self._forced.max_tokens - 1 - self._num_tokens)
