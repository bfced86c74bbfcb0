"""What a JSON schema says to people: it changes nothing about which values are valid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NOTES = frozenset(
    {
        *("title", "description", "examples", "default", "$comment"),
        *("deprecated", "readOnly", "writeOnly"),
    }
)
_NAMED = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
"""Keywords whose members have names of the schema's own."""
_VALUES = frozenset({"const", "enum"})


def without_notes(schema: Any) -> Any:
    """The schema, or list of schemas, without its notes; what isn't one is left as it is."""
    if isinstance(schema, list):
        return [without_notes(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {name: _kept(name, value) for name, value in schema.items() if name not in _NOTES}


def _kept(name: str, value: Any) -> Any:
    if name in _VALUES:
        return value
    if name in _NAMED and isinstance(value, Mapping):
        return {key: without_notes(inner) for key, inner in value.items()}
    return without_notes(value)
