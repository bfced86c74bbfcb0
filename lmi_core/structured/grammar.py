"""What a request's text must be: JSON of a schema, a match of a regex, one of some texts, ..."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from lmi_core.errors import UserError

MAX_GRAMMAR_CHARS = 256 * 1024


class GrammarKind(StrEnum):
    """The languages that a grammar can be written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    """The whole text must match; no look-around, no back-references."""
    CHOICE = "choice"
    """``text`` is a JSON list of strings."""
    CONTEXT_FREE = "grammar"
    """Lark's notation, or GBNF (``root ::= ...``)."""
    LARK = "lark"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """Reasoning in front of a text, of which a grammar says nothing but where it ends."""

    begin: str
    end: str
    after: str = ""
    """What stands between reasoning and the text."""
    lead: str = ""
    """What stands in front of the text, be there reasoning or not."""
    is_open: bool = False
    """The text begins within reasoning; else there may be none."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar as a request gives it; whether it can be compiled shows later."""

    kind: GrammarKind
    text: str
    field: str = dataclasses.field(default="grammar", compare=False)
    """What the request calls it; named in errors."""
    thought: Thought | None = None
    """What may come first; the grammar holds from its end on."""
    instead: Grammar | None = None
    """What may come in the place of the text: calls of tools."""

    def __post_init__(self) -> None:
        if len(self.text) > MAX_GRAMMAR_CHARS:
            raise UserError(
                f"{self.field} has {len(self.text)} characters; at most {MAX_GRAMMAR_CHARS} are "
                "allowed: split it, or leave out what needn't be enforced",
                field=self.field,
            )

    @property
    def num_chars(self) -> int:
        return len(self.text) + (0 if self.instead is None else self.instead.num_chars)

    @classmethod
    def json_schema(cls, schema: Any, *, field: str = "grammar") -> Grammar:
        """JSON that is valid against a schema, given as an object or as its text."""
        if not isinstance(schema, str):
            try:
                schema = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
            except RecursionError:
                raise UserError(f"{field} is nested too deeply", field=field) from None
        return cls(GrammarKind.JSON_SCHEMA, schema, field)

    @classmethod
    def json_object(cls, *, field: str = "grammar") -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, field=field)

    @classmethod
    def regex(cls, pattern: str, *, field: str = "grammar") -> Grammar:
        return cls(GrammarKind.REGEX, pattern, field)

    @classmethod
    def choice(cls, texts: Sequence[str], *, field: str = "grammar") -> Grammar:
        if not texts:
            raise UserError(f"{field} needs at least one text", field=field)
        return cls(GrammarKind.CHOICE, json.dumps(list(texts), ensure_ascii=False), field)

    @classmethod
    def context_free(cls, text: str, *, field: str = "grammar") -> Grammar:
        """Lark's notation, or GBNF."""
        return cls(GrammarKind.CONTEXT_FREE, text, field)

    @classmethod
    def lark(cls, text: str, *, field: str = "grammar") -> Grammar:
        """Lark's notation with the library's extensions, for grammars of our own making."""
        return cls(GrammarKind.LARK, text, field)
