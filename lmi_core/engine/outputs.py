"""What the engine hands back: token events."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from enum import StrEnum

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


@dataclass(slots=True)
class TokenEvent:
    """One generated token of one choice, or the prompt (``prompt`` is set and ``token_id`` is -1).

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
    prompt: tuple[PromptToken, ...] | None = None
    pooled: FloatArray | None = None
    """What the prompt was pooled to, fp32: an embedding, or one score (``token_id`` is -1)."""
    score: float | None = None
    """Of a beam, on its last token: what it was chosen by."""
