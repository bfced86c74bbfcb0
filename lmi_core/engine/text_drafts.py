"""Drafts from texts, and from what grammars force."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Tokens
from typing import NamedTuple, Protocol

from lmi_core import _native
from lmi_core.engine.sequence import DraftedBy, Sequence
from lmi_core.settings.speculation_config import SpeculationConfig
from lmi_core.structured.matcher import Matcher

_MAX_TEXT_TOKENS = 1 << 16
"""Of a sequence, that are searched; the index takes 16 bytes for each."""
_MAX_HISTORY_TOKENS = 1 << 17
_MAX_HISTORIES = 16
"""Of texts that ended, one for each adapter and cache salt: 32 MiB together."""
_RATES_MEMORY = 0.998
"""Of guesses in all those texts: a few hundred tell how often one is right."""
_NUM_FORCED = 16
"""Forced drafts that the chance of the next one is taken from."""
_LEAST_CHANCE_TO_GO_ON = 0.25
"""Of a draft, that it is worth asking what follows it by the grammar."""
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

    def next_chances(self, sequence: Sequence, max_tokens: int) -> list[float]:
        """Of what will be drafted behind the token being computed, as ``Draft.chances``."""
        ...

    def end(self, sequence: Sequence) -> None:
        """The sequence has all of its tokens."""
        ...


def _guessed(
    drafter: _native.Drafter, sequence: Sequence, max_tokens: int, behind: list[int] | None = None
) -> tuple[list[int], list[float]]:
    """By texts. Nothing follows the end of one."""
    token_ids, chances = drafter.draft(max_tokens, behind or ())
    _cut(sequence, token_ids, chances)
    return token_ids, chances


def _cut(sequence: Sequence, token_ids: list[int], chances: list[float]) -> None:
    """Before the first token that ends it: rows behind that would be for nothing."""
    if not sequence.end_ids.isdisjoint(token_ids):
        end = next(i for i, token_id in enumerate(token_ids) if token_id in sequence.end_ids)
        del token_ids[end:], chances[end:]


class ForcedTokens:
    """Spellings of what grammars leave no choice about, and how often models spell it so."""

    def __init__(self) -> None:
        self._first: dict[Sequence, tuple[int, int]] = {}
        """Where a sequence's last forced tokens began, and the first one."""
        self._chance = 0.8

    @property
    def chance(self) -> float:
        """Of a first forced token; behind it, a model spells as the tokenizer does."""
        return self._chance

    def next(self, sequence: Sequence) -> list[int]:
        """What a sequence is forced to go on with."""
        assert sequence.matcher is not None
        position, token_id = self._first.pop(sequence, (len(sequence.token_ids), -1))
        if position < len(sequence.token_ids):
            is_right = sequence.token_ids[position] == token_id
            self._chance += (is_right - self._chance) / _NUM_FORCED
        token_ids = sequence.matcher.forced_tokens()
        if token_ids:
            self._first[sequence] = (len(sequence.token_ids), token_ids[0])
        return token_ids

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
        drafter = self._drafter(sequence)
        is_known = drafter.follow(sequence.token_ids)
        if sequence.matcher is not None:
            return self._by_grammar(sequence, sequence.matcher, drafter, max_tokens)
        return Draft(*_guessed(drafter, sequence, max_tokens)) if is_known else None

    def _by_grammar(
        self, sequence: Sequence, matcher: Matcher, drafter: _native.Drafter, max_tokens: int
    ) -> Draft | None:
        """By turns what is forced and what texts went on with, as far as the grammar allows it."""
        token_ids: list[int] = []
        chances: list[float] = []
        source: DraftedBy = "text"
        forced, chance = self._forced.next(sequence), 1.0
        while True:
            num_left, is_first = max_tokens - len(token_ids), not token_ids
            text, text_chances = _guessed(drafter, sequence, num_left, token_ids)
            allowed = max(0, matcher.num_allowed(token_ids + text) - len(token_ids)) if text else 0
            if forced and (not allowed or self._forced.chance >= text_chances[0]):
                found = forced[:num_left]
                found_chances = [self._forced.chance] * len(found)
                source = "grammar" if is_first else source
            else:
                found, found_chances = text[:allowed], text_chances[:allowed]
            if not found:
                break
            token_ids += found
            chances += [chance * each for each in found_chances]
            chance = chances[-1]
            if len(token_ids) == max_tokens or chance <= _LEAST_CHANCE_TO_GO_ON:
                break
            forced = matcher.forced_tokens(token_ids)
        _cut(sequence, token_ids, chances)
        return Draft(token_ids, chances, source) if token_ids else None

    def next_chances(self, sequence: Sequence, max_tokens: int) -> list[float]:
        drafter = self._drafter(sequence)
        chances = drafter.next_chances(max_tokens) if drafter.follow(sequence.token_ids) else []
        if not chances:
            return []
        token_ids, _ = _guessed(drafter, sequence, 1 + len(chances))
        return chances[: max(0, len(token_ids) - 1)]

    def end(self, sequence: Sequence) -> None:
        self._drafters.pop(sequence, None)
        self._forced.end(sequence)
        if sequence.num_generated:
            start = max(0, sequence.num_prompt - _NUM_PROMPT_TOKENS)
            self.remember(sequence.request.prefix_seed, sequence.token_ids[start:])

    def remember(self, prefix_seed: bytes, token_ids: Tokens[int]) -> None:
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
