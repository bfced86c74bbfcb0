"""Drafts from texts, and from what grammars force."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple, Protocol

from lmi_core import _native
from lmi_core.engine.sequence import Sequence
from lmi_core.settings.speculation_config import SpeculationConfig

_MAX_TEXT_TOKENS = 1 << 16
"""Of a sequence, that are searched; the index takes 16 bytes for each."""
_MAX_HISTORY_TOKENS = 1 << 17
_MAX_HISTORIES = 16
"""Of texts that ended, one for each adapter and cache salt: 32 MiB together."""
_NUM_PROMPT_TOKENS = 64
"""Of a prompt's end, kept with what came after it, so that it is found again from its start."""


class Draft(NamedTuple):
    """What a sequence may go on with; per token the chance that it and those before are right."""

    token_ids: list[int]
    chances: list[float]


class DraftSource(Protocol):
    """Guesses what sequences go on with. Called in the loop's thread, between two steps."""

    def draft(self, sequence: Sequence, max_tokens: int) -> Draft:
        """What may follow the tokens of a sequence, at most so many."""
        ...

    def next_chance(self, sequence: Sequence) -> float:
        """That a draft of what follows the token being computed will be right."""
        ...

    def end(self, sequence: Sequence) -> None:
        """The sequence has all of its tokens."""
        ...


class TextDrafts:
    """Implements ``DraftSource``: the text's own earlier parts, and texts that ended before with
    the same adapter and cache salt."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self._drafters: dict[Sequence, _native.Drafter] = {}
        self._histories: OrderedDict[bytes, _native.TokenIndex] = OrderedDict()

    def draft(self, sequence: Sequence, max_tokens: int) -> Draft:
        if sequence.matcher is not None:
            forced = sequence.matcher.forced_tokens()[:max_tokens]
            if forced:
                return Draft(forced, [1.0] * len(forced))
        return Draft(*self._drafter(sequence).draft(max_tokens))

    def next_chance(self, sequence: Sequence) -> float:
        return self._drafter(sequence).next_chance

    def end(self, sequence: Sequence) -> None:
        self._drafters.pop(sequence, None)
        if sequence.num_generated:
            start = max(0, sequence.num_prompt - _NUM_PROMPT_TOKENS)
            self.remember(sequence.request.prefix_seed, sequence.token_ids[start:])

    def remember(self, prefix_seed: bytes, token_ids: list[int]) -> None:
        """Draft from this text for sequences with the same seed of prefix hashes."""
        self._history(prefix_seed).add_text(token_ids)

    def _drafter(self, sequence: Sequence) -> _native.Drafter:
        drafter = self._drafters.get(sequence)
        if drafter is None:
            drafter = self._drafters[sequence] = _native.Drafter(
                max_tokens=_MAX_TEXT_TOKENS,
                min_match=self._config.min_match,
                max_match=self._config.max_match,
                history=self._history(sequence.request.prefix_seed),
            )
            drafter.start(sequence.token_ids[: sequence.num_prompt])
        num_known = drafter.num_tokens
        if num_known < len(sequence.token_ids):
            drafter.extend(sequence.token_ids[num_known:])
        return drafter

    def _history(self, seed: bytes) -> _native.TokenIndex:
        history = self._histories.get(seed)
        if history is None:
            history = self._histories[seed] = _native.TokenIndex(
                max_tokens=_MAX_HISTORY_TOKENS, num_key_tokens=self._config.min_match
            )
            if len(self._histories) > _MAX_HISTORIES:
                self._histories.popitem(last=False)
        self._histories.move_to_end(seed)
        return history
