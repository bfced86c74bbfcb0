"""Text without some sequences of tokens: n-grams that it had before, words that are banned, and
tokens that are at some places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from lmi_core.structured.matcher import CompiledGrammar, Mask, Matcher

_NO_IDS: npt.NDArray[np.int32] = np.empty(0, np.int32)


def word_sequences(
    words: Iterable[str], encode: Callable[[str], list[int]]
) -> list[tuple[int, ...]]:
    """The tokens of words as a text begins with them, and as they follow a blank."""
    forms = (form for word in words for form in (word.lstrip(), " " + word.lstrip()))
    return sorted({tuple(encode(form)) for form in forms} - {()})


class BannedSequences:
    """Implements ``CompiledGrammar`` for the texts that follow one prompt."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        *,
        ngram_size: int,
        sequences: Sequence[Sequence[int]],
        grammar: CompiledGrammar | None,
        prompt_ngram_size: int = 0,
        source_ids: Sequence[int] | None = None,
        banned_at: Mapping[int, npt.NDArray[np.int32]] | None = None,
    ) -> None:
        """``ngram_size``: so many tokens in a row aren't repeated, of the prompt or of what follows
        it; ``prompt_ngram_size``: of the prompt alone, or of ``source_ids``, of which it was
        made; 0: they may be. ``sequences`` never come to an end, wherever they begin.
        ``banned_at``: what can't be the output's token of such a number. ``grammar``: what the text
        must follow as well."""
        self._prompt_ids = np.asarray(prompt_ids, np.int32)
        self._ngram_size = ngram_size
        self._prompt_ngram_size = prompt_ngram_size
        self._source_ids = self._prompt_ids
        if source_ids is not None:
            self._source_ids = np.asarray(source_ids, np.int32)
        self._banned_at = banned_at or {}
        self._sequences = tuple(np.asarray(sequence, np.int32) for sequence in sequences)
        self._grammar = grammar

    def matcher(self) -> BannedSequencesMatcher:
        inner = None if self._grammar is None else self._grammar.matcher()
        return BannedSequencesMatcher(self, self._prompt_ids, inner)

    def banned_behind(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Tokens that would complete a sequence which is banned, of a text with its prompt; one may
        be there twice."""
        ends = [
            sequence[-1:]
            for sequence in self._sequences
            if len(ids) >= len(sequence) - 1
            and np.array_equal(ids[len(ids) - len(sequence) + 1 :], sequence[:-1])
        ]
        num_output = len(ids) - len(self._prompt_ids)
        return np.concatenate(
            [
                _followers(ids, ids, self._ngram_size),
                _followers(self._source_ids, ids, self._prompt_ngram_size),
                self._banned_at.get(num_output, _NO_IDS),
                *ends,
            ]
        )

    def banned_after(self, output_ids: Sequence[int]) -> npt.NDArray[np.int32]:
        """The same of the prompt with what follows it."""
        output = np.asarray(output_ids, np.int32)
        return self.banned_behind(np.concatenate([self._prompt_ids, output]))

    def is_over(self, num_output: int) -> bool:
        """Whether nothing is banned behind so many tokens of output, whatever they are."""
        has_sequences = self._ngram_size or self._prompt_ngram_size or self._sequences
        return not has_sequences and all(place < num_output for place in self._banned_at)


def _followers(
    before: npt.NDArray[np.int32], ids: npt.NDArray[np.int32], ngram_size: int
) -> npt.NDArray[np.int32]:
    """What comes in ``before`` behind the last tokens of ``ids``; all are an n-gram. 0: nothing."""
    num_last = ngram_size - 1
    if num_last < 0 or min(len(ids), len(before)) <= num_last:
        return _NO_IDS
    last = ids[len(ids) - num_last :]
    starts = np.arange(len(before) - num_last)
    for i, token_id in enumerate(last):
        starts = starts[before[starts + i] == token_id]
    return before[starts + num_last]


class BannedSequencesMatcher:
    """Implements ``Matcher``."""

    def __init__(
        self,
        bans: BannedSequences,
        prompt_ids: npt.NDArray[np.int32],
        inner: Matcher | None,
    ) -> None:
        self._bans = bans
        self._ids = prompt_ids
        """The text so far, and room behind it; shared with others until something is added."""
        self._num_ids = self._num_prompt = len(prompt_ids)
        self._inner = inner

    def fill_mask(self, mask: Mask) -> None:
        if self._inner is None:
            mask[:] = np.iinfo(np.uint32).max
        else:
            self._inner.fill_mask(mask)
        banned = self._bans.banned_behind(self._ids[: self._num_ids])
        bits = np.uint32(1) << (banned % 32).astype(np.uint32)
        np.bitwise_and.at(mask, banned // 32, ~bits)

    def accept(self, token_id: int) -> None:
        if self._inner is not None:
            self._inner.accept(token_id)
        if self._num_ids == len(self._ids):
            room = np.empty(self._num_ids // 2 + 64, np.int32)
            self._ids = np.concatenate([self._ids[: self._num_ids], room])
        self._ids[self._num_ids] = token_id
        self._num_ids += 1

    def forced_tokens(self, behind: Sequence[int] = ()) -> list[int]:
        return [] if self._inner is None else self._inner.forced_tokens(behind)

    def num_allowed(self, token_ids: list[int]) -> int:
        if self._inner is not None:
            token_ids = token_ids[: self._inner.num_allowed(token_ids)]
        ids = np.concatenate([self._ids[: self._num_ids], np.asarray(token_ids, np.int32)])
        for i, token_id in enumerate(token_ids):
            if token_id in self._bans.banned_behind(ids[: self._num_ids + i]):
                return i
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        if self._inner is not None:
            self._inner.rollback(num_tokens)
        self._num_ids -= num_tokens

    @property
    def is_complete(self) -> bool:
        return self._inner is not None and self._inner.is_complete

    @property
    def is_spent(self) -> bool:
        has_inner = self._inner is not None and not self._inner.is_spent
        return not has_inner and self._bans.is_over(self._num_ids - self._num_prompt)
