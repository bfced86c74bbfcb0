"""TGI's grammars: ``{"type": "json" | "json_object" | "json_schema" | "regex", "value": ...}``.

Beyond TGI, since OpenAI's clients send them, a chat's ``response_format`` may also have OpenAI's
forms. What a schema may say is wider than TGI's and blanks are the same; a regex that can't be
compiled is the request's own fault. (TGI's router/src/validation.rs.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from lmi_core.errors import UserError
from lmi_core.structured.grammar import Grammar

_KINDS = ("json", "json_object", "json_schema", "regex")
_ANY_OBJECT = {"type": "object"}


def check_shape(grammar: Mapping[str, Any] | None, name: str = "grammar") -> None:
    """ValueError, in the words of TGI's JSON library, unless it has a known type and a value."""
    if grammar is None:
        return
    if "type" not in grammar:
        raise ValueError(f"missing field `type` of `{name}`")
    if grammar["type"] not in _KINDS:
        allowed = ", ".join(f"`{kind}`" for kind in _KINDS)
        raise ValueError(f"unknown variant of `{name}`, expected one of {allowed}")
    if "value" not in grammar:
        raise ValueError(f"missing field `value` of `{name}`")
    if grammar["type"] == "regex" and not isinstance(grammar["value"], str):
        raise ValueError(f"invalid type of `{name}`: `value` of a regex must be a string")


def plain_response_format(response_format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A chat's response format as a grammar; ValueError when it is none."""
    if response_format is None or response_format.get("type") == "text":
        return None
    grammar = dict(response_format)
    if "value" not in grammar:
        kind = grammar.get("type")
        if kind == "json_schema" and "json_schema" in grammar:
            grammar["value"] = grammar["json_schema"]
        elif kind == "json_object":
            grammar["value"] = _ANY_OBJECT
    check_shape(grammar, "response_format")
    return grammar


def grammar_of(
    form: Mapping[str, Any] | None, *, version: int, is_disabled: bool
) -> Grammar | None:
    """The grammar of a form whose shape was checked; UserError in TGI's words."""
    if form is None:
        return None
    if is_disabled:
        _fail("grammar is not supported")
    kind, value = form["type"], form["value"]
    if kind == "regex":
        return Grammar.regex(value)
    if kind == "json_schema" and isinstance(value, Mapping) and "schema" in value:
        value = value["schema"]
    if isinstance(value, str):
        value = _parsed(value)
    if not isinstance(value, Mapping):
        _fail("grammar is not supported")
    if version >= 3 and value is not _ANY_OBJECT and "properties" not in value:
        _fail("grammar is not valid: Grammar must have a 'properties' field")
    return Grammar.json_schema(value)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        _fail(f"grammar is not valid: {error}")


def _fail(message: str) -> NoReturn:
    raise UserError(message, field="grammar")
