"""Drafts from texts, and from what grammars force."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple, Protocol

from lmi_core import _native
from lmi_core.engine.sequence import DraftedBy, Sequence
from lmi_core.settings.speculation_config import SpeculationConfig

_MAX_TEXT_TOKENS = 1 << 16
"""Of a sequence, that are searched; the index takes 16 bytes for each."""
_MAX_HISTORY_TOKENS = 1 << 17
_MAX_HISTORIES = 16
"""Of texts that ended, one for each adapter and cache salt: 32 MiB together."""
_RATES_MEMORY = 0.998
"""Of guesses in all those texts: a few hundred tell how often one is right."""
_NUM_FORCED = 16
"""Forced drafts that the chance of the next one is taken from."""
_NUM_PROMPT_TOKENS = 64
"""Of a prompt's end, kept with what came after it, so that it is found again from its start."""


class _History(NamedTuple):
    """Of texts that ended, with the same adapter and cache salt."""

    texts: _native.TokenIndex
    rates: _native.GuessRates


class Draft(NamedTuple):
    """What a sequence may go on with; per token the chance that it and those before are right."""

    token_ids: list[int]
    chances: list[float]
    source: DraftedBy = "text"


class DraftSource(Protocol):
    """Guesses what sequences go on with. Called in the loop's thread, between two steps."""

    def draft(self, sequence: Sequence, max_tokens: int) -> Draft | None:
        """What may follow the tokens of a sequence, at most so many."""
        ...

    def next_chance(self, sequence: Sequence) -> float:
        """That a draft of what follows the token being computed will be right."""
        ...

    def end(self, sequence: Sequence) -> None:
        """The sequence has all of its tokens."""
        ...


class ForcedTokens:
    """Spellings of what grammars leave no choice about, and how often models spell it so."""

    def __init__(self) -> None:
        self._first: dict[Sequence, tuple[int, int]] = {}
        """Where a sequence's last forced tokens began, and the first one."""
        self._chance = 0.8

    def draft(self, sequence: Sequence, max_tokens: int) -> Draft | None:
        assert sequence.matcher is not None
        position, token_id = self._first.pop(sequence, (len(sequence.token_ids), -1))
        if position < len(sequence.token_ids):
            is_right = sequence.token_ids[position] == token_id
            self._chance += (is_right - self._chance) / _NUM_FORCED
        token_ids = sequence.matcher.forced_tokens()[:max_tokens]
        if not token_ids:
            return None
        self._first[sequence] = (len(sequence.token_ids), token_ids[0])
        # Behind the first one a model spells as the tokenizer does.
        return Draft(token_ids, [self._chance] * len(token_ids), "grammar")

    def end(self, sequence: Sequence) -> None:
        self._first.pop(sequence, None)


class TextDrafts:
    """Implements ``DraftSource``: the text's own earlier parts, and texts that ended before with
    the same adapter and cache salt."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self._forced = ForcedTokens()
        self._drafters: dict[Sequence, _native.Drafter] = {}
        self._histories: OrderedDict[bytes, _History] = OrderedDict()

    def draft(self, sequence: Sequence, max_tokens: int) -> Draft | None:
        forced = None if sequence.matcher is None else self._forced.draft(sequence, max_tokens)
        drafter = self._drafter(sequence)
        if not drafter.follow(sequence.token_ids):
            return forced
        token_ids, chances = drafter.draft(max_tokens)
        if sequence.matcher is not None:
            del token_ids[sequence.matcher.num_allowed(token_ids) :]
        if not token_ids or (forced is not None and forced.chances[0] >= chances[0]):
            return forced
        return Draft(token_ids, chances[: len(token_ids)])

    def next_chance(self, sequence: Sequence) -> float:
        drafter = self._drafter(sequence)
        return drafter.next_chance if drafter.follow(sequence.token_ids) else 0.0

    def end(self, sequence: Sequence) -> None:
        self._drafters.pop(sequence, None)
        self._forced.end(sequence)
        if sequence.num_generated:
            start = max(0, sequence.num_prompt - _NUM_PROMPT_TOKENS)
            self.remember(sequence.request.prefix_seed, sequence.token_ids[start:])

    def remember(self, prefix_seed: bytes, token_ids: list[int]) -> None:
        """Draft from this text for sequences with the same seed of prefix hashes."""
        self._history(prefix_seed).texts.add_text(token_ids)

    def _drafter(self, sequence: Sequence) -> _native.Drafter:
        drafter = self._drafters.get(sequence)
        if drafter is None:
            history = self._history(sequence.request.prefix_seed)
            drafter = self._drafters[sequence] = _native.Drafter(
                max_tokens=_MAX_TEXT_TOKENS,
                min_match=self._config.min_match,
                max_match=self._config.max_match,
                history=history.texts,
                rates=history.rates,
            )
            drafter.start(sequence.token_ids[: sequence.num_prompt])
        return drafter

    def _history(self, seed: bytes) -> _History:
        history = self._histories.get(seed)
        if history is None:
            texts = _native.TokenIndex(
                max_tokens=_MAX_HISTORY_TOKENS, num_key_tokens=self._config.min_match
            )
            rates = _native.GuessRates(memory=_RATES_MEMORY)
            history = self._histories[seed] = _History(texts, rates)
            if len(self._histories) > _MAX_HISTORIES:
                self._histories.popitem(last=False)
        self._histories.move_to_end(seed)
        return history
