"""Checks of a configuration's fields against their own annotations, for who writes one by hand."""

from __future__ import annotations

import types
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lmi_core.errors import UserError

_NONE = type(None)
_OF_ANY_CLASS = (Path, Mapping)


def is_utf8(name: str) -> bool:
    """Whether answers can hold a name: bytes of a variable or a path that are no text are lone
    surrogates in it."""
    return not any("\ud800" <= char <= "\udfff" for char in name)


def check_fields(config: object) -> None:
    """UserError for the first field whose value isn't of its annotated type, or none of its words.

    An int is as good as a float; True and False are no numbers.
    """
    kind: Any = type(config)
    for name, kinds, words in _allowed(kind):
        value = getattr(config, name)
        if isinstance(value, str) and words:
            is_allowed = value in words
        else:
            is_allowed = type(value) in kinds or any(
                isinstance(value, kind) and kind in kinds for kind in _OF_ANY_CLASS
            )
        if not is_allowed:
            allowed = ", ".join([*words, *("None" if k is _NONE else k.__name__ for k in kinds)])
            raise UserError(f"{name} is {value!r:.80}; allowed are {allowed}", field=name)


@cache
def _allowed(kind: Any) -> tuple[tuple[str, tuple[type, ...], tuple[str, ...]], ...]:
    """Of every field its name, its types and, where only some strings will do, these."""
    return tuple((name, *_parts(hint)) for name, hint in get_type_hints(kind).items())


def _parts(hint: Any) -> tuple[tuple[type, ...], tuple[str, ...]]:
    origin = get_origin(hint)
    if origin is Literal:
        return (), get_args(hint)
    if origin in (Union, types.UnionType):
        kinds: tuple[type, ...] = ()
        words: tuple[str, ...] = ()
        for part in get_args(hint):
            more_kinds, more_words = _parts(part)
            kinds, words = kinds + more_kinds, words + more_words
        return kinds, words
    return ((int, float) if hint is float else (origin or hint,)), ()
