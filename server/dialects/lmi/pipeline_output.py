"""Streams of LMI without a rolling batch: a line per step with a text of every prompt.

Format: DJL-Serving's djl_python/huggingface.py.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence

from lmi_core.engine.outputs import TokenEvent
from lmi_server.dialects.base import Renderer
from lmi_server.dialects.lmi.output import Answer, error_body


class PipelineLinesRenderer(Renderer):
    """``{"outputs": [...]}`` per step; a prompt that has ended says nothing any more."""

    streams = True
    content_type = "application/jsonlines"

    def __init__(self, answer: Answer, *, starts_with_prompt: bool) -> None:
        """``starts_with_prompt``: the first line has the prompts."""
        self._release = answer.release
        self._texts: list[deque[str]] = [deque() for _ in answer.prompts]
        self._has_ended = [False] * len(answer.prompts)
        self._head = _line(answer.prompts) if starts_with_prompt else b""

    def feed(self, index: int, events: Sequence[TokenEvent]) -> bytes:
        for event in events:
            self._texts[index].append(event.text)
            self._has_ended[index] |= event.finish_reason is not None
        head, self._head = self._head, b""
        return head + b"".join(self._steps())

    def _steps(self) -> Iterator[bytes]:
        while any(self._texts) and all(map(_or, self._texts, self._has_ended)):
            yield _line([texts.popleft() if texts else "" for texts in self._texts])

    def finish(self) -> bytes:
        return b""

    def error(self, error: Exception) -> bytes:
        return error_body(error, self._release)


def _or(texts: deque[str], has_ended: bool) -> bool:
    return bool(texts) or has_ended


def _line(texts: Sequence[str]) -> bytes:
    return json.dumps({"outputs": list(texts)}).encode() + b"\n"
