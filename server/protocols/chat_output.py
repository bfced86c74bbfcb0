"""Chat completion responses: one object, or chunks as lines or server-sent events.

Objects are OpenAI's; as LMI does it, chunks of its routes come as JSON lines unless the client
accepts ``text/event-stream``. (LMI format reference, 4.7 and 8.2.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring as quote
from typing import Any

from lmi_core.engine.outputs import TokenEvent, TokenLogprob
from lmi_server.protocols.base import Renderer
from lmi_server.protocols.openai_output import (
    TEXT,
    Answer,
    Usage,
    finish_word,
    finite,
    token_text,
)


@dataclass(slots=True)
class _Choice:
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None


class ChatRenderer(Renderer):
    """One ``chat.completion`` object at the end."""

    streams = False
    content_type = "application/json"

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._choices = [_Choice() for _ in range(answer.num_choices)]
        self._usage = Usage()

    def feed(self, index: int, events: Sequence[TokenEvent]) -> bytes:
        for event in events:
            choice = self._choices[event.choice]
            self._usage.add(event)
            choice.texts.append(event.text)
            if self._answer.logprobs:
                choice.logprobs.append(_logprob(event))
            if event.finish_reason is not None:
                choice.finish_reason = finish_word(event.finish_reason)
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
        return self._answer.dumps(
            {**head, "choices": choices, "usage": self._usage.render()}
        ).encode()

    def error(self, error: Exception) -> bytes:
        return self._answer.error(error)


class ChatLinesRenderer(Renderer):
    """``chat.completion.chunk`` objects, one JSON line each.

    Most chunks differ in their text alone, so they are made of a template around it.
    """

    streams = True
    content_type = "application/jsonlines"

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._has_begun = [False] * answer.num_choices
        self._usage = Usage()
        self._templates = [
            answer.around_text(self._object(index, {"content": TEXT}))
            for index in range(answer.num_choices)
        ]

    def feed(self, index: int, events: Sequence[TokenEvent]) -> bytes:
        frames = []
        for event in events:
            self._usage.add(event)
            chunk = self._chunk(event)
            if chunk:
                frames.append(self._frame(chunk))
        return "".join(frames).encode()

    def finish(self) -> bytes:
        if not self._answer.usage:
            return b""
        head = self._answer.head("chat.completion.chunk")
        chunk = self._answer.dumps({**head, "choices": [], "usage": self._usage.render()})
        return self._frame(chunk).encode()

    def error(self, error: Exception) -> bytes:
        return self._answer.error(error)

    def _chunk(self, event: TokenEvent) -> str:
        if not self._has_begun[event.choice]:
            self._has_begun[event.choice] = True
            delta = {"role": "assistant", "content": event.text}
        elif event.finish_reason is None and not self._answer.logprobs:
            if not event.text:  # half a character, or the beginning of a stop string
                return ""
            before, after = self._templates[event.choice]
            return before + quote(event.text) + after
        else:
            delta = {"content": event.text}
        return self._answer.dumps(self._object(event.choice, delta, event))

    def _object(
        self, choice: int, delta: dict[str, str], event: TokenEvent | None = None
    ) -> dict[str, Any]:
        reason = None if event is None else event.finish_reason
        has_logprobs = event is not None and event.token_id >= 0 and self._answer.logprobs
        chunk: dict[str, Any] = self._answer.head("chat.completion.chunk")
        chunk["choices"] = [
            {
                "index": choice,
                "delta": delta,
                "logprobs": {"content": [_logprob(event)]} if has_logprobs and event else None,
                "finish_reason": None if reason is None else finish_word(reason),
            }
        ]
        if self._answer.usage:
            chunk["usage"] = None
        return chunk

    def _frame(self, chunk: str) -> str:
        return chunk + "\n"


class ChatSseRenderer(ChatLinesRenderer):
    """The chunks as server-sent events, closed by ``[DONE]``."""

    content_type = "text/event-stream"

    def finish(self) -> bytes:
        return super().finish() + b"data: [DONE]\n\n"

    def error(self, error: Exception) -> bytes:
        return b"data: " + self._answer.error(error) + b"\n\n"

    def _frame(self, chunk: str) -> str:
        return f"data: {chunk}\n\n"


def _logprob(event: TokenEvent) -> dict[str, Any]:
    return {**_entry(event), "top_logprobs": [_entry(token) for token in event.top]}


def _entry(token: TokenEvent | TokenLogprob) -> dict[str, Any]:
    text = token_text(token)
    return {"token": text, "logprob": finite(token.logprob), "bytes": list(text.encode())}
