"""What a request's text must be: JSON of a schema, a match of a regex, one of some texts, ..."""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar as a request gives it; whether it can be compiled shows later."""

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        if len(self.text) > MAX_GRAMMAR_CHARS:
            raise UserError(
                f"the grammar has {len(self.text)} characters; at most {MAX_GRAMMAR_CHARS} are "
                "allowed: split it, or leave out what needn't be enforced",
                field="grammar",
            )

    @classmethod
    def json_schema(cls, schema: Any) -> Grammar:
        """JSON that is valid against a schema, given as an object or as its text."""
        if not isinstance(schema, str):
            try:
                schema = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
            except RecursionError:
                raise UserError("the schema is nested too deeply", field="grammar") from None
        return cls(GrammarKind.JSON_SCHEMA, schema)

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        return cls(GrammarKind.REGEX, pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        if not texts:
            raise UserError("a choice needs at least one text", field="grammar")
        return cls(GrammarKind.CHOICE, json.dumps(list(texts), ensure_ascii=False))

    @classmethod
    def context_free(cls, text: str) -> Grammar:
        return cls(GrammarKind.CONTEXT_FREE, text)
