"""Answers of Anthropic's messages: one object, or the events that build it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from lmi_core.engine.outputs import FinishReason, TokenEvent
from lmi_core.tools.calls import CallArguments, CallStart, Content, Piece, Reasoning
from lmi_server.dialects.anthropic.errors import error_event
from lmi_server.dialects.base import UTF8_EVENTS, Renderer
from lmi_server.dialects.openai.chat_output import pieces_of
from lmi_server.dialects.openai.chat_tools import AnswerForm

_REASONS = {
    FinishReason.EOS: "end_turn",
    FinishReason.STOP: "stop_sequence",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.ABORT: "end_turn",
}
_PING = b'event: ping\ndata: {"type": "ping"}\n\n'


class Message:
    """What was said so far: blocks, counts, and how it ended."""

    def __init__(self, message_id: str, model: str, form: AnswerForm | None) -> None:
        self._id = message_id
        self._model = model
        self._parser = None if form is None else form.parser()
        self._hides_reasoning = form is not None and not form.shows_reasoning
        self.stop_reason: str | None = None
        self.stop_sequence: str | None = None
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self.num_generated_tokens = 0

    def add(self, event: TokenEvent) -> list[Piece]:
        """The pieces that an event adds."""
        self._num_prompt_tokens = event.num_prompt_tokens
        self._num_cached_tokens = event.num_cached_tokens
        self.num_generated_tokens += event.token_id >= 0
        if self._parser is None:
            pieces: list[Piece] = [Content(event.text)] if event.text else []
        else:
            pieces = pieces_of(self._parser, event)
        if event.finish_reason is not None:
            self.stop_reason = _REASONS[event.finish_reason]
            if isinstance(event.stop, str):
                self.stop_sequence = event.stop
            elif self.stop_reason == "stop_sequence":
                self.stop_reason = "end_turn"
            has_calls = self._parser is not None and self._parser.num_calls > 0
            if has_calls and self.stop_reason == "end_turn":
                self.stop_reason = "tool_use"
        return pieces

    def head(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            "stop_reason": self.stop_reason,
            "stop_sequence": self.stop_sequence,
            "usage": self.usage(),
        }

    def usage(self) -> dict[str, int]:
        """Prompt tokens that were found in the cache are counted apart from the others."""
        return {
            "input_tokens": self._num_prompt_tokens - self._num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._num_cached_tokens,
            "output_tokens": self.num_generated_tokens,
        }


def _block_of(piece: Piece) -> dict[str, Any]:
    """The block that a piece begins, still empty."""
    match piece:
        case Content():
            return {"type": "text", "text": ""}
        case Reasoning():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case CallStart(_, name):
            call_id = f"toolu_{uuid.uuid4().hex[:24]}"
            return {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        case CallArguments():
            raise AssertionError("arguments come in a call's own block")


_TYPES = {Content: "text", Reasoning: "thinking", CallArguments: "tool_use"}


class MessageRenderer(Renderer):
    """One ``message`` object at the end."""

    streams = False
    content_type = "application/json"

    def __init__(self, message: Message) -> None:
        self._message = message
        self._blocks: list[dict[str, Any]] = []
        self._inputs: dict[int, str] = {}
        """The JSON of tools' inputs, by the number of their block."""

    def feed(self, index: int, events: Sequence[TokenEvent]) -> bytes:
        for event in events:
            for piece in self._message.add(event):
                self._add(piece)
        return b""

    def finish(self) -> bytes:
        """A call that was cut short within its input is left out: there is no form for it."""
        blocks = []
        for number, block in enumerate(self._blocks):
            if block["type"] == "tool_use":
                try:
                    block["input"] = json.loads(self._inputs.get(number) or "{}", strict=False)
                except ValueError:
                    continue
            blocks.append(block)
        return json.dumps(self._message.head(blocks), ensure_ascii=False).encode()

    def error(self, error: Exception) -> bytes:
        return error_event(error)

    def _add(self, piece: Piece) -> None:
        blocks = self._blocks
        if not blocks or blocks[-1]["type"] != _TYPES.get(type(piece)):
            blocks.append(_block_of(piece))
        match piece:
            case Content(text):
                blocks[-1]["text"] += text
            case Reasoning(text):
                blocks[-1]["thinking"] += text
            case CallArguments(_, text):
                number = len(blocks) - 1
                self._inputs[number] = self._inputs.get(number, "") + text


class MessageEventsRenderer(Renderer):
    """The message's events: its start, every block's start, deltas and stop, its end."""

    streams = True
    content_type = UTF8_EVENTS
    keep_alive = _PING

    def __init__(self, message: Message) -> None:
        self._message = message
        self._has_begun = False
        self._type: str | None = None
        """Of the block that is open."""
        self._num_blocks = 0

    def feed(self, index: int, events: Sequence[TokenEvent]) -> bytes:
        frames: list[bytes] = []
        for event in events:
            pieces = self._message.add(event)
            if not self._has_begun:
                self._has_begun = True
                start = {**self._message.head([]), "stop_reason": None, "stop_sequence": None}
                frames += [_frame("message_start", message=start), _PING]
            for piece in pieces:
                frames += self._piece(piece)
        return b"".join(frames)

    def finish(self) -> bytes:
        message = self._message
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        frames = [
            *self._close(),
            _frame("message_delta", delta=delta, usage=message.usage()),
            _frame("message_stop"),
        ]
        return b"".join(frames)

    def error(self, error: Exception) -> bytes:
        return error_event(error)

    def _piece(self, piece: Piece) -> list[bytes]:
        frames = []
        if isinstance(piece, CallStart) or self._type != _TYPES[type(piece)]:
            frames += self._close()
            block = _block_of(piece)
            self._type = block["type"]
            frames.append(
                _frame("content_block_start", index=self._num_blocks, content_block=block)
            )
        match piece:
            case Content(text):
                frames.append(self._delta({"type": "text_delta", "text": text}))
            case Reasoning(text):
                frames.append(self._delta({"type": "thinking_delta", "thinking": text}))
            case CallArguments(_, text):
                frames.append(self._delta({"type": "input_json_delta", "partial_json": text}))
        return frames

    def _delta(self, delta: dict[str, str]) -> bytes:
        return _frame("content_block_delta", index=self._num_blocks, delta=delta)

    def _close(self) -> list[bytes]:
        if self._type is None:
            return []
        frames = []
        if self._type == "thinking":
            frames.append(self._delta({"type": "signature_delta", "signature": ""}))
        frames.append(_frame("content_block_stop", index=self._num_blocks))
        self._type = None
        self._num_blocks += 1
        return frames


def _frame(kind: str, **fields: Any) -> bytes:
    data = json.dumps({"type": kind, **fields}, ensure_ascii=False)
    return f"event: {kind}\ndata: {data}\n\n".encode()
