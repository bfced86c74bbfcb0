"""The request fields that ask for structured output, in OpenAI's and open servers' forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lmi_core.errors import UserError
from lmi_core.structured.grammar import Grammar
from lmi_core.structured.structural_tag import structural_tag
from lmi_server.dialects.unknown_fields import shape

RESPONSE_FORMAT = shape(
    "type",
    "format",
    "structures",
    "triggers",
    "schema",
    "value",
    json_schema=shape("name", "description", "schema", "strict"),
)
"""Of OpenAI's ``response_format``, with the names that TGI and llama-server have a schema under."""
_GUIDED_FIELDS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


def requested_grammar(body: Any) -> Grammar | None:
    """What ``response_format``, ``structured_outputs`` or a ``guided_`` field of a body, which has
    all of them, asks for; null counts as absent. Raises UserError naming the field when one is
    wrong or several are given."""
    asked = []
    if body.response_format is not None:
        grammar = _response_format(body.response_format)
        if grammar is not None:
            asked.append(("response_format", grammar))
    for name, value in (body.structured_outputs or {}).items():
        if name in _MAKERS and value not in (None, False):
            asked.append((f"structured_outputs.{name}", _made(name, value, "structured_outputs")))
        elif name not in _MAKERS and value is not None and name not in _HINTS:
            raise UserError(
                f"structured_outputs.{name} is not available in this version; allowed are "
                f"{', '.join(_MAKERS)}",
                field="structured_outputs",
            )
    for name in _GUIDED_FIELDS:
        value = getattr(body, name)
        if value is not None:
            asked.append((name, _made(name.removeprefix("guided_"), value, name)))
    if len(asked) > 1:
        names = " and ".join(name for name, _ in asked)
        raise UserError(f"{names} exclude each other; send one of them", field=asked[1][0])
    return asked[0][1] if asked else None


_HINTS = frozenset({"disable_any_whitespace", "disable_fallback"})
"""Ignored: they choose between forms and libraries that there aren't."""


def _response_format(response_format: Mapping[str, Any]) -> Grammar | None:
    kind = response_format.get("type")
    if kind == "text":
        return None
    for name in ("value", "schema"):
        if response_format.get(name) is not None and kind in ("json", "json_object", "regex"):
            make = _regex if kind == "regex" else _json
            return make(response_format[name], "response_format")
    if kind == "json_object":
        return Grammar.json_object(field="response_format")
    if kind == "structural_tag":
        return structural_tag(response_format, field="response_format")
    if kind != "json_schema":
        raise UserError(
            "response_format.type must be text, json_object, json_schema or structural_tag, got "
            f"{str(kind)[:40]!r}",
            field="response_format",
        )
    form = response_format.get("json_schema")
    if not (isinstance(form, Mapping) and isinstance(form.get("schema"), Mapping)):
        raise UserError(
            "response_format.json_schema needs a name and a schema object", field="response_format"
        )
    return Grammar.json_schema(form["schema"], field="response_format")


def _made(kind: str, value: Any, field: str) -> Grammar:
    return _MAKERS[kind](value, field)


def _json(value: Any, field: str) -> Grammar:
    if not isinstance(value, Mapping | str | bool):
        raise _wrong(field, "a schema: an object, or its JSON text", value)
    return Grammar.json_schema(value, field=field)


def _json_object(value: Any, field: str) -> Grammar:
    if value is not True:
        raise _wrong(field, "true or false", value)
    return Grammar.json_object(field=field)


def _regex(value: Any, field: str) -> Grammar:
    if not isinstance(value, str):
        raise _wrong(field, "a string", value)
    return Grammar.regex(value, field=field)


def _choice(value: Any, field: str) -> Grammar:
    if not (isinstance(value, list) and value and all(isinstance(text, str) for text in value)):
        raise _wrong(field, "a list of strings, at least one", value)
    return Grammar.choice(value, field=field)


def _context_free(value: Any, field: str) -> Grammar:
    if not isinstance(value, str):
        raise _wrong(field, "a string", value)
    return Grammar.context_free(value, field=field)


def _tag(value: Any, field: str) -> Grammar:
    return structural_tag(value, field=field)


def _wrong(field: str, allowed: str, value: Any) -> UserError:
    return UserError(f"{field} must be {allowed}, got {str(value)[:40]!r}", field=field)


_MAKERS: Mapping[str, Callable[[Any, str], Grammar]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _context_free,
    "structural_tag": _tag,
}
"""By the names that open servers give them."""
