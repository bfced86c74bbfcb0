"""What the objects of OpenAI's two generating routes share: counts, words, JSON."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmi_core.engine.outputs import (
    FinishReason,
    PromptToken,
    PromptTokens,
    TokenEvent,
    TokenLogprob,
)
from lmi_server.dialects.encode import encoded

_FINISH = {FinishReason.EOS: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
_LEAST_LOGPROB = -9999.0
_FINGERPRINT = "system_fingerprint"
TEXT = "TEXT"
"""Stands in an object for the text that each frame fills in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is the same in every object of one response."""

    id: str
    model: str
    error: Callable[[Exception], bytes]
    """The last object of a stream that fails."""
    num_choices: int = 1
    """Per prompt."""
    num_prompts: int = 1
    logprobs: bool = False
    usage: bool = False
    """Streams end with an object with the counts."""
    usage_in_chunks: bool = False
    """Every chunk has the counts so far."""
    token_ids: bool = False
    """Choices name the ids of their tokens, and once those of the prompt."""
    tokens_as_ids: bool = False
    """Log-probabilities call tokens ``token_id:`` and the id, since texts may be ambiguous."""
    prompt_logprobs: int | None = None
    """Per prompt token its own log-probability and so many of the likeliest; -1: all reported."""
    has_prompt_logprobs: bool = False
    """Whole answers have the field ``prompt_logprobs``, null if it wasn't asked for."""
    compact: bool = True
    """JSON without blanks, as OpenAI writes it; LMI writes Python's."""
    as_events: bool = True
    """Streams are server-sent events, closed by ``[DONE]``; else JSON lines."""
    fingerprint: str | None = None
    """What decides the tokens besides the request; None: it isn't said."""
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return head if self.fingerprint is None else {**head, _FINGERPRINT: self.fingerprint}

    def token_name(self, token: TokenEvent | PromptToken | TokenLogprob) -> str:
        """What log-probabilities call a token."""
        return self.name_of(token.token_id, token_text(token))

    def name_of(self, token_id: int, text: str) -> str:
        """The same of a token's id and text."""
        return f"token_id:{token_id}" if self.tokens_as_ids else text

    def prompt_fields(self, prompt: Sequence[PromptToken] | None) -> dict[str, Any]:
        """What a whole answer says of the tokens of a prompt, as far as it was asked for."""
        fields: dict[str, Any] = {}
        if self.token_ids:
            fields["prompt_token_ids"] = _ids_of(prompt or ())
        num_top = self.prompt_logprobs
        if num_top is not None:
            fields["prompt_logprobs"] = [_prompt_scores(token, num_top) for token in prompt or ()]
        elif self.has_prompt_logprobs:
            fields["prompt_logprobs"] = None
        return fields

    def dumps(self, value: object, *, is_long: bool = False) -> str:
        """``is_long``: it may tell of a whole prompt."""
        if is_long:
            return encoded(value, compact=self.compact).decode()
        return json.dumps(
            value, ensure_ascii=False, separators=(",", ":") if self.compact else None
        )

    @property
    def stream_type(self) -> str:
        """The content type of a stream."""
        return "text/event-stream" if self.as_events else "application/jsonlines"

    @property
    def stream_end(self) -> str:
        """What a stream ends with that didn't fail."""
        return self.framed("[DONE]") if self.as_events else ""

    def framed(self, text: str) -> str:
        """An object's JSON as one of a stream."""
        return f"data: {text}\n\n" if self.as_events else f"{text}\n"

    def frame(self, value: object, *, is_long: bool = False) -> str:
        """As ``framed(dumps(...))``."""
        return self.framed(self.dumps(value, is_long=is_long))

    def around_text(self, value: object) -> tuple[str, str]:
        """An object's frame before and after the text that it has as ``TEXT``."""
        before, _, after = self.frame(value).rpartition(f'"{TEXT}"')
        return before, after


@dataclass(slots=True)
class Usage:
    """The counts of one response; prompts are counted once, however many choices they have."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0

    def add(self, event: TokenEvent) -> None:
        if event.choice == 0 and event.num_generated_tokens == 1:
            self.num_prompt_tokens += event.num_prompt_tokens
            self.num_cached_tokens += event.num_cached_tokens
        if event.token_id >= 0:
            self.num_generated_tokens += 1

    def render(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_generated_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_generated_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


def _ids_of(prompt: Sequence[PromptToken]) -> list[int]:
    if isinstance(prompt, PromptTokens):
        return list(prompt.token_ids)
    return [token.token_id for token in prompt]


def _prompt_scores(token: PromptToken, num_top: int) -> dict[str, Any] | None:
    """vLLM's form: by token id, the likeliest first, the token itself among them; None for the
    first token."""
    if token.logprob is None:
        return None
    top = token.top if num_top < 0 else token.top[:num_top]
    scores = {str(entry.token_id): _score(entry, rank) for rank, entry in enumerate(top, start=1)}
    return {str(token.token_id): _score(token, token.rank)} | scores


def _score(token: PromptToken | TokenLogprob, rank: int | None) -> dict[str, Any]:
    return {"logprob": finite(token.logprob), "rank": rank, "decoded_token": token.text}


def finish_word(reason: FinishReason) -> str:
    return _FINISH.get(reason, str(reason))


def token_text(token: TokenEvent | PromptToken | TokenLogprob) -> str:
    """The token's own text; what an event shows can be less or more."""
    return (token.token or token.text) if isinstance(token, TokenEvent) else token.text


def finite(logprob: float | None) -> float:
    """OpenAI's own floor stands for tokens that are all but impossible."""
    return _LEAST_LOGPROB if logprob is None or not math.isfinite(logprob) else logprob
