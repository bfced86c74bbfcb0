"""Chat answers as LMI 0.27 to 0.29 write them: OpenAI's objects with LMI's words and some gaps.

There is no ``model``, ends have LMI's names, log-probabilities come only with ``top_logprobs`` and
describe the token itself, ``bytes`` are code points; a chunk's ``logprobs`` are a list, and name
the number where the token belongs. (djl_python/chat_completions.)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from lmi_core.engine.outputs import TokenEvent
from lmi_server.dialects.base import Renderer
from lmi_server.dialects.encode import encoded
from lmi_server.dialects.lmi.output import error_body
from lmi_server.dialects.lmi.release import Release
from lmi_server.dialects.openai.chat_schema import ChatBody
from lmi_server.dialects.openai.output import finite, token_text


def chat_renderer(
    chat: ChatBody, answer_id: str, num_choices: int, release: Release
) -> LmiChatRenderer:
    """The renderer of a chat's answer: one object, or one line per token."""
    renderer = LmiChatLinesRenderer if chat.stream else LmiChatRenderer
    shows_logprobs = bool(chat.logprobs and chat.top_logprobs)
    return renderer(answer_id, num_choices, shows_logprobs, release)


class LmiChatRenderer(Renderer):
    """One ``chat.completion`` object at the end."""

    streams = False
    content_type = "application/json"

    def __init__(
        self, answer_id: str, num_choices: int, shows_logprobs: bool, release: Release
    ) -> None:
        self._id = answer_id
        self._release = release
        self._shows_logprobs = shows_logprobs
        self._created = int(time.time())
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._choices: list[list[TokenEvent]] = [[] for _ in range(num_choices)]
        self.absorbs_failures = release.ends_failures_in_form

    def feed(self, index: int, events: Sequence[TokenEvent]) -> bytes:
        for event in events:
            self._count(event)
            self._choices[event.choice].append(event)
        return b""

    def finish(self) -> bytes:
        return encoded(
            {
                **self._head("chat.completion"),
                "choices": [self._choice(*numbered) for numbered in enumerate(self._choices)],
                "usage": {
                    "prompt_tokens": self._num_prompt_tokens,
                    "completion_tokens": self._num_generated_tokens,
                    "total_tokens": self._num_prompt_tokens + self._num_generated_tokens,
                },
            }
        )

    def error(self, error: Exception) -> bytes:
        return self.finish() if self.absorbs_failures else error_body(error, self._release)

    def _choice(self, index: int, events: Sequence[TokenEvent]) -> dict[str, Any]:
        reason = events[-1].finish_reason if events else None
        shown = [_logprob(event) for event in events]
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(event.text for event in events)},
            "logprobs": {"content": shown} if self._shows_logprobs else None,
            # A choice has no reason only where a failure has ended it.
            "finish_reason": "error" if reason is None else str(reason),
        }

    def _count(self, event: TokenEvent) -> None:
        self._num_prompt_tokens = event.num_prompt_tokens
        self._num_generated_tokens += 1

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created}


class LmiChatLinesRenderer(LmiChatRenderer):
    """One ``chat.completion.chunk`` object and line per token."""

    streams = True
    content_type = "application/jsonlines"

    def feed(self, index: int, events: Sequence[TokenEvent]) -> bytes:
        return b"".join([self._chunk(event) for event in events])

    def finish(self) -> bytes:
        return b""

    def error(self, error: Exception) -> bytes:
        if not self.absorbs_failures:
            return error_body(error, self._release)
        return self._line({"index": 0, "delta": {"content": ""}, **_END_OF_FAILURE})

    def _chunk(self, event: TokenEvent) -> bytes:
        delta = {"content": event.text}
        if event.num_generated_tokens == 1:
            delta["role"] = "assistant"
        logprobs = None
        if self._shows_logprobs:
            entry = _logprob(event)
            entry["top_logprobs"] = [{**entry["top_logprobs"][0], "token": entry["logprob"]}]
            logprobs = [{"content": [entry]}]
        reason = None if event.finish_reason is None else str(event.finish_reason)
        return self._line(
            {"index": event.choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        )

    def _line(self, choice: dict[str, Any]) -> bytes:
        return encoded({**self._head("chat.completion.chunk"), "choices": [choice]}) + b"\n"


_END_OF_FAILURE = {"logprobs": None, "finish_reason": "error"}


def _logprob(event: TokenEvent) -> dict[str, Any]:
    text = token_text(event)
    entry = {
        "token": text,
        "logprob": finite(event.logprob),
        "bytes": [ord(character) for character in text] or None,
    }
    return {**entry, "top_logprobs": [entry]}
