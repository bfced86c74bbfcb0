"""Objects as JSON, long ones a piece at a time.

``json.dumps`` is one call, which holds the interpreter's lock from its beginning to its end. Here
no call encodes more than some items of a list.
"""

from __future__ import annotations

from collections.abc import Iterator
from json import JSONEncoder
from typing import Any

_ITEMS = 64


def encoded(value: object, *, compact: bool = False) -> bytes:
    """What ``json.dumps`` gives with ``ensure_ascii=False``; ``compact``: without blanks."""
    separators = (",", ":") if compact else None
    encoder = JSONEncoder(ensure_ascii=False, separators=separators)
    return b"".join([piece.encode() for piece in _pieces(value, encoder)])


def _pieces(value: Any, encoder: JSONEncoder) -> Iterator[str]:
    before = ""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield f"{before or '{'}{encoder.encode(name)}{encoder.key_separator}"
            yield from _pieces(inner, encoder)
            before = encoder.item_separator
        yield "}"
    elif isinstance(value, list) and len(value) > _ITEMS:
        for start in range(0, len(value), _ITEMS):
            yield f"{before or '['}{encoder.encode(value[start : start + _ITEMS])[1:-1]}"
            before = encoder.item_separator
        yield "]"
    elif isinstance(value, list) and value:
        for item in value:
            yield before or "["
            yield from _pieces(item, encoder)
            before = encoder.item_separator
        yield "]"
    else:
        yield encoder.encode(value)
