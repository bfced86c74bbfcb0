"""Text of a few tokens: a list of ids that alone may be generated, with a grammar or without."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from lmi_core.errors import UserError
from lmi_core.structured.matcher import CompiledGrammar, Mask, Matcher


class AllowedTokens:
    """Implements ``CompiledGrammar``: its matchers keep what they allow in common."""

    def __init__(
        self, token_ids: Sequence[int], vocab_size: int, grammar: CompiledGrammar | None
    ) -> None:
        """``token_ids``: below ``vocab_size``; ``grammar``: what the text must follow as well."""
        bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
        bits[list(token_ids)] = 1
        self._mask: Mask = np.packbits(bits, bitorder="little").view(np.uint32)
        self._grammar = grammar

    def matcher(self) -> AllowedTokensMatcher:
        inner = None if self._grammar is None else self._grammar.matcher()
        return AllowedTokensMatcher(self._mask, inner)


class AllowedTokensMatcher:
    """Implements ``Matcher``."""

    def __init__(self, mask: Mask, inner: Matcher | None) -> None:
        self._mask = mask
        self._inner = inner

    def fill_mask(self, mask: Mask) -> None:
        if self._inner is None:
            mask[: len(self._mask)] = self._mask
            return
        self._inner.fill_mask(mask)
        mask[: len(self._mask)] &= self._mask
        if not mask.any():
            raise UserError(
                "none of allowed_token_ids can follow by the grammar that the request has, too",
                field="allowed_token_ids",
            )

    def accept(self, token_id: int) -> None:
        if self._inner is not None:
            self._inner.accept(token_id)

    def forced_tokens(self, behind: Sequence[int] = ()) -> list[int]:
        forced = [] if self._inner is None else self._inner.forced_tokens(behind)
        return list(takewhile(self._allows, forced))

    def num_allowed(self, token_ids: list[int]) -> int:
        allowed = list(takewhile(self._allows, token_ids))
        return len(allowed) if self._inner is None else self._inner.num_allowed(allowed)

    def _allows(self, token_id: int) -> bool:
        return bool(self._mask[token_id >> 5] >> (token_id & 31) & 1)

    def rollback(self, num_tokens: int) -> None:
        if self._inner is not None:
            self._inner.rollback(num_tokens)

    @property
    def is_complete(self) -> bool:
        return self._inner is not None and self._inner.is_complete

    @property
    def is_spent(self) -> bool:
        return False
