"""Text without some sequences of tokens: n-grams that it had before, and words that are banned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

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
    ) -> None:
        """``ngram_size``: so many tokens in a row aren't repeated, of the prompt or of what follows
        it; 0: they may be. ``sequences`` never come to an end, wherever they begin. ``grammar``:
        what the text must follow as well."""
        self._prompt_ids = np.asarray(prompt_ids, np.int32)
        self._ngram_size = ngram_size
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
        return np.concatenate([self._repeated(ids), *ends])

    def banned_after(self, output_ids: Sequence[int]) -> npt.NDArray[np.int32]:
        """The same of the prompt with what follows it."""
        output = np.asarray(output_ids, np.int32)
        return self.banned_behind(np.concatenate([self._prompt_ids, output]))

    def _repeated(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """What followed the last tokens of ``ids`` where they came before."""
        num_before = self._ngram_size - 1
        if num_before < 0 or len(ids) <= num_before:
            return _NO_IDS
        last = ids[len(ids) - num_before :]
        starts = np.arange(len(ids) - num_before)
        for i, token_id in enumerate(last):
            starts = starts[ids[starts + i] == token_id]
        return ids[starts + num_before]


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
        self._num_ids = len(prompt_ids)
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
        return False
