"""Text whose first token is said beforehand, or whose last one where it is as long as it may be
(BART's, an end)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lmi_core.structured.matcher import CompiledGrammar, Mask, Matcher


class ForcedBounds:
    """Implements ``CompiledGrammar``."""

    def __init__(
        self,
        grammar: CompiledGrammar | None,
        *,
        max_tokens: int,
        begin_id: int | None = None,
        end_ids: Sequence[int] = (),
    ) -> None:
        """``begin_id``: the first token; None: any. ``end_ids``: of which one is the last of
        ``max_tokens``; empty: any. Both come whatever ``grammar`` says, which the others follow."""
        self._grammar = grammar
        self._num_before_end = max_tokens - 1
        self._begin_ids = () if begin_id is None else (begin_id,)
        self._end_ids = tuple(end_ids)
        self.is_open = not self._end_ids
        """Whether the last token is free."""

    def matcher(self) -> ForcedBoundsMatcher:
        return ForcedBoundsMatcher(self, None if self._grammar is None else self._grammar.matcher())

    def forced_at(self, place: int) -> tuple[int, ...]:
        """Of which the token of this number is one; empty: it is free."""
        if self._end_ids and place >= self._num_before_end:
            return self._end_ids
        return () if place else self._begin_ids

    def num_free(self, place: int) -> int | None:
        """How many tokens are free from this number on, if it is; None: all of them."""
        return None if self.is_open else self._num_before_end - place


class ForcedBoundsMatcher:
    """Implements ``Matcher``."""

    def __init__(self, forced: ForcedBounds, inner: Matcher | None) -> None:
        self._forced = forced
        self._inner = inner
        self._num_tokens = 0

    def fill_mask(self, mask: Mask) -> None:
        if forced := self._forced.forced_at(self._num_tokens):
            mask[:] = 0
            for token_id in forced:
                mask[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        elif self._inner is None:
            mask[:] = np.iinfo(np.uint32).max
        else:
            self._inner.fill_mask(mask)

    def accept(self, token_id: int) -> None:
        if self._inner is not None and not self._forced.forced_at(self._num_tokens):
            self._inner.accept(token_id)
        self._num_tokens += 1

    def forced_tokens(self, behind: Sequence[int] = ()) -> list[int]:
        place = self._num_tokens + len(behind)
        if self._inner is None or self._forced.forced_at(place):
            return []
        num_begun = 1 if behind and self._forced.forced_at(self._num_tokens) else 0
        return self._inner.forced_tokens(behind[num_begun:])[: self._forced.num_free(place)]

    def num_allowed(self, token_ids: list[int]) -> int:
        forced = [self._forced.forced_at(self._num_tokens + i) for i in range(len(token_ids))]
        free = [token_id for token_id, ids in zip(token_ids, forced, strict=True) if not ids]
        num_free = len(free) if self._inner is None else self._inner.num_allowed(free)
        for i, (token_id, ids) in enumerate(zip(token_ids, forced, strict=True)):
            if token_id not in ids if ids else not num_free:
                return i
            num_free -= not ids
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        first = self._num_tokens - num_tokens
        if self._inner is not None:
            places = range(first, self._num_tokens)
            self._inner.rollback(sum(not self._forced.forced_at(place) for place in places))
        self._num_tokens = first

    @property
    def is_complete(self) -> bool:
        return self._inner is not None and self._inner.is_complete

    @property
    def is_spent(self) -> bool:
        has_inner = self._inner is not None and not self._inner.is_spent
        return self._forced.is_open and self._num_tokens > 0 and not has_inner
