"""What the parsers of tool calls and of reasoning are written with.

A parser is a generator that reads a text that isn't all there yet: each ``yield`` waits for more.
All that the reader offers decides by characters alone, never by where a piece of text ended, so
that a streamed text gives what the whole text gives.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

from lmi_core.tools.calls import (
    CallArguments,
    CallReader,
    CallStart,
    Content,
    Piece,
    Reasoning,
)

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Waits at each yield; T is what it returns."""
Parse = Callable[["Reader"], Steps[None]]
"""A parser. Text that it leaves is content."""


class TextParser:
    """Runs parsers, one after the other, over one choice's text."""

    def __init__(
        self,
        parses: Sequence[Parse],
        tools: Mapping[str, Mapping[str, Any]],
        make: Callable[[], TextParser] | None = None,
    ) -> None:
        """``tools``: the schemas of their arguments by the names of the tools. ``make``: makes
        another one, where this one is copied into another process before it has read anything."""
        self._make = make
        self.reader = Reader(tools)
        self._steps = self._run(parses)
        next(self._steps, None)

    def __reduce__(self) -> tuple[Callable[[], TextParser], tuple[()]]:
        assert self._make is not None, "the parser can't be copied"
        return self._make, ()

    def push(self, text: str) -> list[Piece]:
        """What is new with this text."""
        if not text:
            return []
        self.reader.held += text
        next(self._steps, None)
        return self.reader.take_pieces()

    def flush(self) -> list[Piece]:
        """What was held back, once no text comes any more."""
        self.reader.is_closed = True
        next(self._steps, None)
        return self.reader.take_pieces()

    @property
    def num_calls(self) -> int:
        return self.reader.num_calls

    def _run(self, parses: Sequence[Parse]) -> Steps[None]:
        for parse in parses:
            yield from parse(self.reader)
        yield from self.reader.show_until(self.reader.content)
        self.reader.end()


class Reader:
    """Text that came and isn't consumed, and the pieces that it was turned into."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self.tools = tools
        self.held = ""
        self.is_closed = False
        """No more text comes."""
        self.num_calls = 0
        self._pieces: list[Piece] = []
        self._blanks = ""
        """Read at the end of the content: shown if more of it comes."""
        self._has_content = False
        """Some was shown since the last call."""
        self._has_argument = False

    def take_pieces(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def more(self) -> Steps[bool]:
        """Wait for more text; False: none comes."""
        if self.is_closed:
            return False
        yield
        return True

    def take(self) -> str:
        """All text that isn't consumed."""
        text, self.held = self.held, ""
        return text

    # Reading.

    def show_until(self, show: Callable[[str], None], *marks: str) -> Steps[str | None]:
        """Consume text up to and with the first of some marks, which no two may share characters
        of; ``show`` gets what comes before as early as possible. None: the text ended first."""
        while True:
            found = [(self.held.find(mark), mark) for mark in marks if mark in self.held]
            if found:
                start, mark = min(found)
                show(self.held[:start])
                self.held = self.held[start + len(mark) :]
                return mark
            size = 0 if self.is_closed else _undecided(self.held, marks)
            end = len(self.held) - size
            show(self.held[:end])
            self.held = self.held[end:]
            if not (yield from self.more()):
                return None

    def read_until(self, *marks: str) -> Steps[tuple[str, str | None]]:
        """As ``show_until``, but hands over the text before the mark."""
        texts: list[str] = []
        mark = yield from self.show_until(texts.append, *marks)
        return "".join(texts), mark

    def blanks(self) -> Steps[str]:
        """Consume blanks."""
        taken = ""
        while True:
            rest = self.held.lstrip()
            taken += self.held[: len(self.held) - len(rest)]
            self.held = rest
            if rest or not (yield from self.more()):
                return taken

    def starts_with(self, *options: str) -> Steps[str]:
        """Consume the longest of some options that the text starts with; empty: none."""
        while not self.is_closed and any(
            len(option) > len(self.held) and option.startswith(self.held) for option in options
        ):
            yield
        found = max((o for o in options if self.held.startswith(o)), key=len, default="")
        self.held = self.held[len(found) :]
        return found

    def value(self, show: Callable[[str], None]) -> Steps[bool]:
        """Consume a JSON object or list, as it comes; False: the text ended within it."""
        depth, in_string, is_escaped = 0, False, False
        while True:
            for number, char in enumerate(self.held):
                if in_string:
                    in_string = is_escaped or char != '"'
                    is_escaped = char == "\\" and not is_escaped
                elif char == '"':
                    in_string = True
                elif char in "{[":
                    depth += 1
                elif char in "}]":
                    depth -= 1
                    if not depth:
                        show(self.held[: number + 1])
                        self.held = self.held[number + 1 :]
                        return True
            show(self.held)
            self.held = ""
            if not (yield from self.more()):
                return False

    def call_object(self, before: str = "", *, is_bare: bool = False) -> Steps[bool]:
        """Consume a call that is an object of a name and arguments. Whatever isn't becomes
        content, after ``before``, which was read before it; then False. ``is_bare``: an object of
        another name than a tool's is none."""
        call = CallReader(before)
        while True:
            num_read = call.push(self.held)
            self.held = self.held[num_read:]
            is_known = call.name is not None and (call.has_arguments or call.is_done)
            if is_bare:
                is_known = is_known and call.name in self.tools
            if is_known:  # it was so before the text that broke it
                if not call.is_announced:
                    call.is_announced = True
                    self.start(call.name or "")
                self.arguments(call.take_arguments())
            if call.is_done and is_known:
                if not call.has_arguments:
                    self.arguments("{}")
                return True
            if call.is_done or call.is_broken or not (yield from self.more()):
                if not call.is_announced:
                    self.content(call.text)
                return False

    def call_list(self, before: str) -> Steps[bool]:
        """Consume a call's object, or a list of them; see ``call_object``."""
        before += yield from self.blanks()
        if not (yield from self.starts_with("[")):
            return (yield from self.call_object(before))
        before += "["
        while (yield from self.call_object(before)):
            before = ""
            yield from self.blanks()
            if not (yield from self.starts_with(",")):
                yield from self.starts_with("]")
                return True
            yield from self.blanks()
        return False

    # Writing.

    def put(self, pieces: Sequence[Piece], num_calls: int) -> None:
        """Pieces that another parser has made, and the calls among all of them."""
        self._pieces += pieces
        self.num_calls = num_calls

    def content(self, text: str) -> None:
        """Blanks after a call or before another are left out."""
        text = self._blanks + text
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        if not shown:
            return
        if self.num_calls and not self._has_content:
            shown = shown.lstrip()
        self._has_content = True
        self._pieces.append(Content(shown))

    def reasoning(self, text: str) -> None:
        if text:
            self._pieces.append(Reasoning(text))

    def start(self, name: str) -> None:
        """A call of a tool begins."""
        if self._has_content and not self.num_calls:
            self._pieces += [Content(self._blanks)] if self._blanks else []
        self._blanks = ""
        self._has_content = self._has_argument = False
        self._pieces.append(CallStart(self.num_calls, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """A piece of the JSON of the last call's arguments."""
        if text:
            self._pieces.append(CallArguments(self.num_calls - 1, text))

    def argument(self, name: str, value: object) -> None:
        """One of the last call's arguments, where they come one by one."""
        written = json.dumps(value, ensure_ascii=False)
        self.arguments(f"{', ' if self._has_argument else '{'}{json.dumps(name)}: {written}")
        self._has_argument = True

    def end_arguments(self) -> None:
        self.arguments("}" if self._has_argument else "{}")

    def typed(self, tool: str, name: str, text: str) -> object:
        """An argument that is written without quotes: a text if the schema says so, else JSON if
        it is some."""
        properties = self.tools.get(tool, {}).get("properties", {})
        schema = properties.get(name, {}) if isinstance(properties, Mapping) else {}
        if isinstance(schema, Mapping) and schema.get("type") == "string":
            return text
        try:
            return json.loads(text, parse_constant=_no_number)
        except (ValueError, RecursionError):
            return text

    def end(self) -> None:
        """The text is over: blanks at the end of an answer without calls are its own."""
        if self._blanks and not self.num_calls:
            self._pieces.append(Content(self._blanks))
        self._blanks = ""


def _undecided(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    longest = max(map(len, marks), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0


def _no_number(name: str) -> object:
    raise ValueError(f"{name} is no JSON")
