"""Objects as JSON, long ones a piece at a time.

``json.dumps`` is one call, which holds the interpreter's lock from its beginning to its end. Here
no call encodes more than some items of a list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from json import JSONEncoder
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")

_ITEMS = 64


class Shown(NamedTuple, Generic[T]):
    """A list of what ``show`` makes of each item, which is there only while it is encoded, and
    whose items are gone behind it.

    A collection of garbage looks at every list and object with the lock held, and what ends at once
    ends with it held. The first passes over tuples of numbers, texts and such tuples.
    """

    items: list[T]
    show: Callable[[T], Any]


def encoded(value: object, *, compact: bool = False) -> bytes:
    """What ``json.dumps`` gives with ``ensure_ascii=False``; ``compact``: without blanks. An
    iterator is a list of items that are long, each there only while it is encoded."""
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
    elif isinstance(value, Shown):
        items = value.items[::-1]
        value.items.clear()
        while items:
            shown = [value.show(items.pop()) for _ in range(min(_ITEMS, len(items)))]
            yield f"{before or '['}{encoder.encode(shown)[1:-1]}"
            before = encoder.item_separator
        yield "]" if before else "[]"
    elif isinstance(value, Iterator):
        for item in value:
            yield before or "["
            yield from _pieces(item, encoder)
            before = encoder.item_separator
        yield "]" if before else "[]"
    elif isinstance(value, list) and value:
        for start in range(0, len(value), _ITEMS):
            items = value[start : start + _ITEMS]
            if not any(map(_is_long, items)):
                yield f"{before or '['}{encoder.encode(items)[1:-1]}"
                before = encoder.item_separator
                continue
            for item in items:
                yield before or "["
                yield from _pieces(item, encoder)
                before = encoder.item_separator
        yield "]"
    else:
        yield encoder.encode(value)


def _is_long(value: Any) -> bool:
    """Whether it has to be encoded in pieces."""
    if isinstance(value, Shown | Iterator):
        return True
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return len(inner) > _ITEMS or any(map(_is_long, inner))
