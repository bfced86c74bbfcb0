"""Tool calls in a model's text, found while the text comes.

Two forms are known: Hermes', ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` anywhere
in the text, and Llama 3's, a text that is ``{"name": ..., "parameters": {...}}``, or several such
objects with semicolons between them. An object without tags counts as a call only if its name is
that of a tool, so that an answer that happens to be JSON stays an answer.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass

BEGIN, END = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Call number ``index`` of the answer, of the tool ``name``; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments, which together are the model's JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote before its answer, for itself."""

    text: str


Piece = Content | Reasoning | CallStart | CallArguments


class ToolCallParser:
    """Splits one choice's text into content and calls, as early as possible."""

    def __init__(self, names: Collection[str], *, needs_tags: bool = False) -> None:
        """``names``: of the tools that may be called; ``needs_tags``: in Hermes' form only."""
        self._names = names
        self._held = ""
        """Text of which isn't decided what it is."""
        self._reader: CallReader | None = None
        self._is_tagged = False
        """Whether the call being read has tags."""
        self._may_be_bare = not needs_tags
        """Only blanks and calls came so far."""
        self._is_closing = False
        """A tagged call is complete, its end tag isn't."""
        self._is_after_call = False
        """Only blanks came since the last call; they aren't shown."""
        self.num_calls = 0

    def push(self, text: str) -> list[Piece]:
        """What is new with this text."""
        self._held += text
        pieces: list[Piece] = []
        while self._advance(pieces):
            pass
        return pieces

    def flush(self) -> list[Piece]:
        """What was held back, once no text comes any more."""
        held, self._held = self._held, ""
        pieces: list[Piece] = []
        if self._reader is not None:
            pieces += self._give_up(self._reader)
        elif not self._is_closing and (held.strip() or not self.num_calls):
            pieces += _content(held)
        return pieces

    def _advance(self, pieces: list[Piece]) -> bool:
        """Take something off the held text; False when there is nothing to decide."""
        if self._reader is not None:
            return self._read_call(self._reader, pieces)
        if self._is_closing:
            return self._close()
        if self._is_after_call:
            self._held = self._held.lstrip()
            self._is_after_call = not self._held
        if self._may_be_bare:
            text = self._held.lstrip(" \t\r\n;," if self.num_calls else None)
            text = text.removeprefix(_PYTHON_TAG).lstrip()
            if text.startswith("{"):
                num_before = len(self._held) - len(text)
                self._begin(num_before, self._held[:num_before], is_tagged=False)
                return True
            if not text or BEGIN.startswith(text) or _PYTHON_TAG.startswith(text):
                return False
            if not text.startswith(BEGIN):
                self._may_be_bare = False
        start = self._held.find(BEGIN)
        if start >= 0:
            before = self._held[:start]
            pieces += _content(before.rstrip() if self.num_calls else before)
            self._begin(start + len(BEGIN), BEGIN, is_tagged=True)
            return True
        shown = self._held[: _undecided(self._held)]
        self._held = self._held[len(shown) :]
        pieces += _content(shown)
        return False

    def _begin(self, num_chars: int, before: str, *, is_tagged: bool) -> None:
        """Read a call after ``num_chars``; ``before`` belongs to it if it turns out to be text."""
        self._held = self._held[num_chars:]
        self._reader = CallReader(before)
        self._is_tagged = is_tagged

    def _read_call(self, reader: CallReader, pieces: list[Piece]) -> bool:
        if not self._held:
            return False
        num_read = reader.push(self._held)
        self._held = self._held[num_read:]
        if self._is_call(reader):  # it was one before the text that broke it
            pieces += self._call_pieces(reader)
        if reader.is_broken or (reader.is_done and not reader.is_announced):
            pieces += self._give_up(reader)
            return True
        if not reader.is_done:
            return False
        self._reader = None
        self._is_closing = self._is_tagged
        return True

    def _is_call(self, reader: CallReader) -> bool:
        """Whether enough is known to announce the call."""
        if reader.name is None:
            return False
        if self._is_tagged:
            return reader.has_arguments or reader.is_done
        return reader.has_arguments and reader.name in self._names

    def _call_pieces(self, reader: CallReader) -> list[Piece]:
        pieces: list[Piece] = []
        if not reader.is_announced:
            assert reader.name is not None
            reader.is_announced = True
            pieces.append(CallStart(self.num_calls, reader.name))
            self.num_calls += 1
        arguments = reader.take_arguments()
        if reader.is_done and not reader.has_arguments:
            arguments = "{}"
        if arguments:
            pieces.append(CallArguments(self.num_calls - 1, arguments))
        return pieces

    def _give_up(self, reader: CallReader) -> list[Piece]:
        """What was read is no call, unless it was announced already."""
        self._reader = None
        self._may_be_bare = False
        if reader.is_announced:
            return []
        return _content(reader.text)

    def _close(self) -> bool:
        text = self._held.lstrip(" \t\r\n}")  # some models write a brace too many
        if END.startswith(text):
            self._held = text
            if text != END:
                return False
        self._held = text.removeprefix(END)
        self._is_closing = False
        self._is_after_call = True
        return bool(self._held)


class CallReader:
    """Reads one JSON object, character by character, for its name and its arguments."""

    def __init__(self, before: str) -> None:
        self.text = before
        self.name: str | None = None
        self.has_arguments = False
        self.is_done = False
        self.is_broken = False
        self.is_announced = False
        self._depth = 0
        self._string: str | None = None
        self._is_escaped = False
        self._key = ""
        self._is_value = False
        """After the colon of a member of the object itself."""
        self._in_arguments = False
        self._arguments = ""

    def push(self, text: str) -> int:
        """Read on; returns how many characters belong to the object."""
        for number, char in enumerate(text):
            self._read(char)
            self.text += char
            if self.is_done or self.is_broken:
                return number + 1
        return len(text)

    def take_arguments(self) -> str:
        """The text of the arguments since the last call."""
        taken, self._arguments = self._arguments, ""
        return taken

    def _read(self, char: str) -> None:
        if self._string is not None:
            self._read_string(char)
            return
        if self._depth == 0 and char != "{":
            self.is_broken = not char.isspace()
            return
        if char == '"':
            self._string = char
        elif char in "{[":
            self._depth += 1
            if self._depth == 2 and char == "{" and self._is_argument_value():
                self._in_arguments = self.has_arguments = True
        elif char == ":" and self._depth == 1:
            self._is_value = True
        elif char == "," and self._depth == 1:
            self._is_value = False
        if self._in_arguments:
            self._arguments += char
        if char in "}]":
            self._depth -= 1
            if self._depth == 1:
                self._in_arguments = False
            self.is_done = self._depth == 0

    def _read_string(self, char: str) -> None:
        assert self._string is not None
        self._string += char
        if self._in_arguments:
            # The opening quote is there already.
            self._arguments += char
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            whole, self._string = self._string, None
            if self._depth == 1:
                self._end_string(whole)

    def _end_string(self, whole: str) -> None:
        try:
            value = json.loads(whole, strict=False)
        except ValueError:
            self.is_broken = True
            return
        if not self._is_value:
            self._key = value
        elif self._key in _NAME_KEYS:
            self.name = value if self.name is None else self.name  # the first was announced
        elif self._is_argument_value():  # JSON in a string, as some models write it
            self.has_arguments = True
            self._arguments += value

    def _is_argument_value(self) -> bool:
        return self._is_value and self._key in _ARGUMENT_KEYS and not self.has_arguments


def _content(text: str) -> list[Piece]:
    return [Content(text)] if text else []


def _undecided(text: str) -> int:
    """Where the end of ``text`` begins that may belong to a tag, or to blanks before one."""
    end = len(text)
    for size in range(min(len(BEGIN) - 1, len(text)), 0, -1):
        if text.endswith(BEGIN[:size]):
            end -= size
            break
    return len(text[:end].rstrip())
