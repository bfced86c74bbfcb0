"""What the engine hands back: token events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from typing import Any, overload

import msgspec

from lmi_core.weights.formats import FloatArray


class FinishReason(StrEnum):
    """Why a choice ended."""

    LENGTH = "length"
    """max_new_tokens, or the context is full."""
    EOS = "eos_token"
    STOP = "stop_sequence"
    """A stop string or a stop token id."""
    ABORT = "abort"
    POOLED = "pooled"
    """The prompt has its vector or score; nothing is generated."""


# A long prompt's log-probabilities are many: collections of garbage, which hold all threads, would
# look at each of the next two kinds.
class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """One of the most likely tokens at a position; ``logprob`` is a natural logarithm."""

    token_id: int
    text: str
    logprob: float


class PromptToken(msgspec.Struct, frozen=True, gc=False):
    """A token of the prompt; the first one has no log-probability."""

    token_id: int
    text: str
    logprob: float | None
    top: tuple[TokenLogprob, ...] = ()
    rank: int | None = None
    """Its place among all tokens, the likeliest being 1; None: of the first, and where another
    library doesn't say."""


PromptScore = tuple[float | None, tuple[TokenLogprob, ...], int | None]
"""Of a token of a prompt its log-probability, the likeliest tokens, and its rank."""


class PromptTokens(Sequence[PromptToken]):
    """A prompt's tokens, each of which is made when it is looked at: all at once would hold a loop
    where a prompt is long, or many come together."""

    __slots__ = ("_scores", "_text_of", "token_ids")

    def __init__(
        self,
        token_ids: Sequence[int],
        text_of: Callable[[int], str],
        scores: Sequence[PromptScore | None] = (),
    ) -> None:
        """``scores``: of each token; none: of no token."""
        self.token_ids = token_ids
        self._text_of = text_of
        self._scores = scores

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, place: int) -> PromptToken: ...
    @overload
    def __getitem__(self, place: slice) -> list[PromptToken]: ...
    def __getitem__(self, place: int | slice) -> PromptToken | list[PromptToken]:
        if isinstance(place, slice):
            return [self._token(i) for i in range(*place.indices(len(self)))]
        return self._token(range(len(self))[place])

    def __iter__(self) -> Iterator[PromptToken]:
        return map(self._token, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PromptTokens) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process, which may have no tokenizer."""
        texts = {token_id: self._text_of(token_id) for token_id in self.token_ids}
        return PromptTokens, (self.token_ids, texts.__getitem__, self._scores)

    def _token(self, place: int) -> PromptToken:
        token_id = self.token_ids[place]
        score = (self._scores[place] if self._scores else None) or (None, (), None)
        return PromptToken(token_id, self._text_of(token_id), *score)


@dataclass(slots=True)
class TokenEvent:
    """One generated token of one choice, or, with ``token_id`` -1, the prompt (``prompt`` is set)
    or the end of an aborted choice.

    ``text`` is what may be shown now: it never holds half a character or what may be cut off as
    part of a stop string, so it can be empty, and a later token's text can hold what an earlier one
    kept back. The texts of a choice joined are its generated text.
    """

    request_id: str
    choice: int
    token_id: int
    text: str
    special: bool = False
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    num_generated_tokens: int = 0
    """Of this choice, this token included."""
    finish_reason: FinishReason | None = None
    """Set on the choice's last event."""
    stop: str | int | None = None
    """The stop string or stop token id that ended the choice."""
    seed: int | None = None
    """The seed in use, when the choice was sampled."""
    _: KW_ONLY
    token: str = ""
    """The token's own text, if log-probabilities were asked for."""
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()
    queue_seconds: float = 0.0
    """How long the request waited to be run; on a choice's first token only."""
    prompt: Sequence[PromptToken] | None = None
    pooled: FloatArray | None = None
    """What the prompt was pooled to, fp32: an embedding, or one score (``token_id`` is -1)."""
    score: float | None = None
    """Of a beam, on its last token: what it was chosen by."""
