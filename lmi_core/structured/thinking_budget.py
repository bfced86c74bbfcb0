"""A budget for reasoning: when its tokens are used, the mark that ends reasoning is all that may
come next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from lmi_core.errors import UserError
from lmi_core.structured.matcher import CompiledGrammar, Mask, Matcher


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget:
    """How many tokens between the marks of reasoning an answer may have; the marks don't count."""

    num_tokens: int
    begin: str
    end: str
    is_open: bool = False
    """The answer begins within reasoning."""
    is_hint: bool = False
    """An engine that can't keep it may go without."""
    field: str = "thinking_token_budget"
    """What the request calls it; named in errors."""

    def validate(self) -> None:
        """Raise UserError for a number or marks that can't be."""
        if type(self.num_tokens) is not int or self.num_tokens < 0:
            raise UserError(
                f"{self.field} must be a number of tokens, at least 0, got {self.num_tokens!r}",
                field=self.field,
            )
        if not self.end or not (self.begin or self.is_open):
            raise UserError(f"{self.field} needs the marks of reasoning", field=self.field)


class _Phase(IntEnum):
    BEFORE = 0
    """Nothing but blanks, or a part of the first mark, has come."""
    THINKING = 1
    ENDING = 2
    """The last mark is being forced."""
    OVER = 3


class _State(NamedTuple):
    phase: _Phase
    num_tokens: int = 0
    """Of reasoning, or of the forced mark."""
    tail: bytes = b""
    """Of the text: what may be the beginning of a mark."""


class ThinkingLimit:
    """Implements ``CompiledGrammar`` for one tokenizer."""

    def __init__(
        self,
        budget: ThinkingBudget,
        end_ids: Sequence[int],
        token_bytes: Callable[[int], bytes],
        grammar: CompiledGrammar | None,
    ) -> None:
        """``end_ids`` spell the last mark; ``grammar``: what the text must follow as well."""
        self.budget = budget
        self.end_ids = tuple(end_ids)
        self._token_bytes = token_bytes
        self._begin, self._end = budget.begin.encode(), budget.end.encode()
        self._grammar = grammar

    def matcher(self) -> ThinkingMatcher:
        return ThinkingMatcher(self, None if self._grammar is None else self._grammar.matcher())

    @property
    def start(self) -> _State:
        return self._thinking(0, b"") if self.budget.is_open else _State(_Phase.BEFORE)

    def after(self, state: _State, token_id: int) -> _State:
        """The state once a token has come."""
        match state.phase:
            case _Phase.BEFORE:
                text = (state.tail + self._token_bytes(token_id)).lstrip()
                if text.startswith(self._begin):
                    text = text[len(self._begin) :]
                    return _State(_Phase.OVER) if self._end in text else self._thinking(0, text)
                goes_on = self._begin.startswith(text)
                return _State(_Phase.BEFORE, 0, text) if goes_on else _State(_Phase.OVER)
            case _Phase.THINKING:
                text = state.tail + self._token_bytes(token_id)
                if self._end in text:
                    return _State(_Phase.OVER)
                return self._thinking(state.num_tokens + 1, text)
            case _Phase.ENDING if state.num_tokens + 1 < len(self.end_ids):
                return _State(_Phase.ENDING, state.num_tokens + 1)
        return _State(_Phase.OVER)

    def forced(self, state: _State) -> tuple[int, ...]:
        """The ids that must come next."""
        return self.end_ids[state.num_tokens :] if state.phase is _Phase.ENDING else ()

    def _thinking(self, num_tokens: int, text: bytes) -> _State:
        if num_tokens >= self.budget.num_tokens:
            return _State(_Phase.ENDING)
        return _State(_Phase.THINKING, num_tokens, text[max(0, len(text) - len(self._end) + 1) :])


class ThinkingMatcher:
    """Implements ``Matcher``."""

    def __init__(self, limit: ThinkingLimit, inner: Matcher | None) -> None:
        self._limit = limit
        self._inner = inner
        self._states = [limit.start]
        """After each token until reasoning was over."""
        self._num_behind = 0
        """Tokens after that."""

    def fill_mask(self, mask: Mask) -> None:
        if self._inner is None:
            mask[:] = np.iinfo(np.uint32).max
        else:
            self._inner.fill_mask(mask)
        forced = self._limit.forced(self._states[-1])
        if forced:
            word, bit = forced[0] >> 5, np.uint32(1 << (forced[0] & 31))
            is_allowed = bool(mask[word] & bit)
            mask[:] = 0
            if not is_allowed:
                budget = self._limit.budget
                raise UserError(
                    f"{budget.field}: reasoning can't end after {budget.num_tokens} tokens, since "
                    f"what else the request asks for leaves no place for {budget.end!r}",
                    field=budget.field,
                )
            mask[word] = bit

    def accept(self, token_id: int) -> None:
        if self._inner is not None:
            self._inner.accept(token_id)
        if self._states[-1].phase is _Phase.OVER:
            self._num_behind += 1
        else:
            self._states.append(self._limit.after(self._states[-1], token_id))

    def forced_tokens(self, behind: Sequence[int] = ()) -> list[int]:
        forced = () if behind else self._limit.forced(self._states[-1])
        if forced or self._inner is None:
            return list(forced)
        return self._inner.forced_tokens(behind)

    def num_allowed(self, token_ids: list[int]) -> int:
        if self._inner is not None:
            token_ids = token_ids[: self._inner.num_allowed(token_ids)]
        state = self._states[-1]
        for index, token_id in enumerate(token_ids):
            forced = self._limit.forced(state)
            if forced and forced[0] != token_id:
                return index
            state = self._limit.after(state, token_id)
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        if self._inner is not None:
            self._inner.rollback(num_tokens)
        num_behind = min(num_tokens, self._num_behind)
        self._num_behind -= num_behind
        del self._states[len(self._states) - (num_tokens - num_behind) :]

    @property
    def is_complete(self) -> bool:
        return self._inner is not None and self._inner.is_complete

    @property
    def is_spent(self) -> bool:
        return self._inner is None and self._states[-1].phase is _Phase.OVER
