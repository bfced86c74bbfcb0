"""Chat completion responses: one object, or chunks as lines or server-sent events.

Objects are OpenAI's; as LMI does it, chunks come as JSON lines unless the client accepts
``text/event-stream``. (LMI format reference, 4.7 and 8.2.)
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lmi_core.engine.outputs import FinishReason, TokenEvent, TokenLogprob
from lmi_server.protocols.base import Renderer
from lmi_server.protocols.lmi_output import error_body

_FINISH = {FinishReason.EOS: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """What is the same in every object of one response."""

    id: str
    model: str
    num_choices: int = 1
    logprobs: bool = False
    usage: bool = False
    """Send a last chunk with the counts."""
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass(slots=True)
class _Usage:
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0

    def add(self, event: TokenEvent) -> None:
        self.num_prompt_tokens = event.num_prompt_tokens
        self.num_cached_tokens = event.num_cached_tokens
        self.num_generated_tokens += 1

    def render(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_generated_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_generated_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


@dataclass(slots=True)
class _Choice:
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None


class ChatRenderer(Renderer):
    """One ``chat.completion`` object at the end."""

    streams = False
    content_type = "application/json"

    def __init__(self, answer: ChatAnswer) -> None:
        self._answer = answer
        self._choices = [_Choice() for _ in range(answer.num_choices)]
        self._usage = _Usage()

    def feed(self, index: int, events: Sequence[TokenEvent]) -> bytes:
        for event in events:
            choice = self._choices[event.choice]
            self._usage.add(event)
            choice.texts.append(event.text)
            if self._answer.logprobs:
                choice.logprobs.append(_logprob(event))
            if event.finish_reason is not None:
                choice.finish_reason = _finish_word(event)
        return b""

    def finish(self) -> bytes:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(choice.texts)},
                "logprobs": {"content": choice.logprobs} if self._answer.logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(self._choices)
        ]
        head = self._answer.head("chat.completion")
        return _dumps({**head, "choices": choices, "usage": self._usage.render()})

    def error(self, error: Exception) -> bytes:
        return error_body(error)


class ChatLinesRenderer(Renderer):
    """``chat.completion.chunk`` objects, one JSON line each."""

    streams = True
    content_type = "application/jsonlines"

    def __init__(self, answer: ChatAnswer) -> None:
        self._answer = answer
        self._head = _dumps(answer.head("chat.completion.chunk"))[:-1]
        self._has_begun = [False] * answer.num_choices
        self._usage = _Usage()

    def feed(self, index: int, events: Sequence[TokenEvent]) -> bytes:
        return b"".join([self._frame(self._chunk(event)) for event in events])

    def finish(self) -> bytes:
        if not self._answer.usage:
            return b""
        usage = _dumps({"choices": [], "usage": self._usage.render()})
        return self._frame(self._head + b", " + usage[1:])

    def error(self, error: Exception) -> bytes:
        return error_body(error)

    def _chunk(self, event: TokenEvent) -> bytes:
        self._usage.add(event)
        delta: dict[str, str] = {"content": event.text}
        if not self._has_begun[event.choice]:
            self._has_begun[event.choice] = True
            delta = {"role": "assistant", "content": event.text}
        choice = {
            "index": event.choice,
            "delta": delta,
            "logprobs": {"content": [_logprob(event)]} if self._answer.logprobs else None,
            "finish_reason": None if event.finish_reason is None else _finish_word(event),
        }
        return self._head + b', "choices": [' + _dumps(choice) + b"]}"

    def _frame(self, chunk: bytes) -> bytes:
        return chunk + b"\n"


class ChatSseRenderer(ChatLinesRenderer):
    """The chunks as server-sent events, closed by ``[DONE]``."""

    content_type = "text/event-stream"

    def finish(self) -> bytes:
        return super().finish() + self._frame(b"[DONE]")

    def error(self, error: Exception) -> bytes:
        return self._frame(error_body(error))

    def _frame(self, chunk: bytes) -> bytes:
        return b"data: " + chunk + b"\n\n"


def _finish_word(event: TokenEvent) -> str:
    assert event.finish_reason is not None
    return _FINISH.get(event.finish_reason, str(event.finish_reason))


def _logprob(event: TokenEvent) -> dict[str, Any]:
    top = [_entry(token) for token in event.top]
    return {**_entry(event), "top_logprobs": top}


def _entry(token: TokenEvent | TokenLogprob) -> dict[str, Any]:
    logprob = token.logprob
    if logprob is None or not math.isfinite(logprob):
        # OpenAI's own floor for tokens that are all but impossible.
        logprob = -9999.0
    return {"token": token.text, "logprob": logprob, "bytes": list(token.text.encode())}


def _dumps(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
