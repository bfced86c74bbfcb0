"""What the objects of OpenAI's two generating routes share: counts, words, JSON."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lmi_core.engine.outputs import FinishReason, PromptToken, TokenEvent, TokenLogprob

_FINISH = {FinishReason.EOS: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
_LEAST_LOGPROB = -9999.0
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
    compact: bool = True
    """JSON without blanks, as OpenAI writes it; LMI writes Python's."""
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def dumps(self, value: object) -> str:
        return json.dumps(
            value, ensure_ascii=False, separators=(",", ":") if self.compact else None
        )

    def around_text(self, value: object) -> tuple[str, str]:
        """The JSON of an object before and after the text that it has as ``TEXT``."""
        before, _, after = self.dumps(value).rpartition(f'"{TEXT}"')
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


def finish_word(reason: FinishReason) -> str:
    return _FINISH.get(reason, str(reason))


def token_text(token: TokenEvent | PromptToken | TokenLogprob) -> str:
    """The token's own text; what an event shows can be less or more."""
    return (token.token or token.text) if isinstance(token, TokenEvent) else token.text


def finite(logprob: float | None) -> float:
    """OpenAI's own floor stands for tokens that are all but impossible."""
    return _LEAST_LOGPROB if logprob is None or not math.isfinite(logprob) else logprob
