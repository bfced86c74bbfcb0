"""Items of a response's output, and the events that build each of them."""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from typing import Any

from lmi_core.tools.calls import CallArguments, Content, Piece, Reasoning
from lmi_server.dialects.openai.responses_tools import InputReader

Event = tuple[str, dict[str, Any]]
"""The type of an event and its fields, but for its number and its item's place."""


class Item(ABC):
    """One item as it grows."""

    def __init__(self, prefix: str) -> None:
        self.id = f"{prefix}_{uuid.uuid4().hex}"
        self._status = "in_progress"
        self._texts: list[str] = []

    @abstractmethod
    def takes(self, piece: Piece) -> bool:
        """Whether a piece belongs to this item."""

    @abstractmethod
    def object(self) -> dict[str, Any]:
        """The item as it is now."""

    def begin(self) -> list[Event]:
        return [("response.output_item.added", {"item": self.object()})]

    @abstractmethod
    def add(self, piece: Piece) -> list[Event]: ...

    def end(self, *, is_cut: bool) -> list[Event]:
        """``is_cut``: the answer ended for its length."""
        self._status = "completed" if self._is_whole(is_cut) else "incomplete"
        return [*self._done(), ("response.output_item.done", {"item": self.object()})]

    def _is_whole(self, is_cut: bool) -> bool:
        return not is_cut

    @abstractmethod
    def _done(self) -> list[Event]: ...

    @property
    def _text(self) -> str:
        return "".join(self._texts)


class Text(Item):
    """A message, or reasoning: an item of one part."""

    def __init__(self, *, is_reasoning: bool) -> None:
        super().__init__("rs" if is_reasoning else "msg")
        self._is_reasoning = is_reasoning
        self._has_part = False
        self._kind = "reasoning_text" if is_reasoning else "output_text"

    def takes(self, piece: Piece) -> bool:
        return isinstance(piece, Reasoning if self._is_reasoning else Content)

    def object(self) -> dict[str, Any]:
        content = [self._part(self._text)] if self._has_part else []
        if self._is_reasoning:
            kind: dict[str, Any] = {"type": "reasoning", "summary": [], "encrypted_content": None}
        else:
            kind = {"type": "message", "role": "assistant"}
        return {"id": self.id, **kind, "status": self._status, "content": content}

    def begin(self) -> list[Event]:
        events = super().begin()
        self._has_part = True
        part = {"content_index": 0, "part": self._part("")}
        return [*events, ("response.content_part.added", part)]

    def add(self, piece: Piece) -> list[Event]:
        assert isinstance(piece, Content | Reasoning)
        if not piece.text:
            return []
        self._texts.append(piece.text)
        return [(f"response.{self._kind}.delta", self._fields(delta=piece.text))]

    def _done(self) -> list[Event]:
        return [
            (f"response.{self._kind}.done", self._fields(text=self._text)),
            ("response.content_part.done", {"content_index": 0, "part": self._part(self._text)}),
        ]

    def _fields(self, **text: str) -> dict[str, Any]:
        logprobs: dict[str, Any] = {} if self._is_reasoning else {"logprobs": []}
        return {"content_index": 0, **text, **logprobs}

    def _part(self, text: str) -> dict[str, Any]:
        extras: dict[str, Any] = {} if self._is_reasoning else {"annotations": [], "logprobs": []}
        return {"type": self._kind, "text": text, **extras}


class Call(Item):
    """A call of a function."""

    def __init__(self, name: str, prefix: str = "fc") -> None:
        super().__init__(prefix)
        self._name = name
        self._call_id = f"call_{uuid.uuid4().hex[:24]}"

    def takes(self, piece: Piece) -> bool:
        return isinstance(piece, CallArguments)

    def object(self) -> dict[str, Any]:
        return {**self._head("function_call"), "arguments": self._text}

    def add(self, piece: Piece) -> list[Event]:
        if not isinstance(piece, CallArguments):
            return []
        self._texts.append(piece.text)
        return [("response.function_call_arguments.delta", {"delta": piece.text})]

    def _is_whole(self, is_cut: bool) -> bool:
        """The last call of an answer that was cut may be whole."""
        return _is_object(self._text)

    def _done(self) -> list[Event]:
        done = {"name": self._name, "arguments": self._text}
        return [("response.function_call_arguments.done", done)]

    def _head(self, kind: str) -> dict[str, Any]:
        call = {"call_id": self._call_id, "name": self._name}
        return {"id": self.id, "type": kind, "status": self._status, **call}


class CustomCall(Call):
    """A call of a custom tool, whose input is in a function's arguments or is a text as it is."""

    def __init__(self, name: str, *, is_text: bool = False) -> None:
        super().__init__(name, "ctc")
        self._is_text = is_text
        self._reader = InputReader()
        self._arguments = ""

    def takes(self, piece: Piece) -> bool:
        return isinstance(piece, Content if self._is_text else CallArguments)

    def object(self) -> dict[str, Any]:
        return {**self._head("custom_tool_call"), "input": self._text}

    def add(self, piece: Piece) -> list[Event]:
        if isinstance(piece, CallArguments):
            self._arguments += piece.text
            return self._delta(self._reader.push(piece.text))
        return self._delta(piece.text) if isinstance(piece, Content) else []

    def _delta(self, text: str) -> list[Event]:
        if not text:
            return []
        self._texts.append(text)
        return [("response.custom_tool_call_input.delta", {"delta": text})]

    def _is_whole(self, is_cut: bool) -> bool:
        return not is_cut if self._is_text else _is_object(self._arguments)

    def _done(self) -> list[Event]:
        rest = self._delta(self._reader.flush())
        return [*rest, ("response.custom_tool_call_input.done", {"input": self._text})]


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, strict=False), dict)
    except (ValueError, RecursionError):
        return False
