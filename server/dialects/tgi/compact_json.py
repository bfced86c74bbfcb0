"""Pieces of compact JSON as TGI's serializer writes them: short floats, raw non-ASCII."""

from __future__ import annotations

import math
from collections.abc import Iterable
from json.encoder import encode_basestring as quote

import numpy as np

__all__ = ["array", "boolean", "number", "quote"]

_DECIMAL_MIN = 1e-6
"""Numbers below are written with an exponent."""


def number(value: float | None) -> str:
    """The shortest digits that give back the same 32-bit float; null when it isn't finite."""
    if value is None or not math.isfinite(value):
        return "null"
    text = str(np.float32(value))
    if "e" not in text:
        return text
    if abs(value) >= _DECIMAL_MIN * 0.99999:
        return np.format_float_positional(np.float32(value), unique=True, trim="0")
    digits, _, exponent = text.partition("e")
    return f"{digits}e{int(exponent)}"


def boolean(value: bool) -> str:
    return "true" if value else "false"


def array(items: Iterable[str]) -> str:
    return f"[{','.join(items)}]"
