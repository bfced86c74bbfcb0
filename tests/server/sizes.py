"""Bodies with one large value: long, wide, deep, many."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

_MARK = "\x00grown\x00"


def _repeated(item: bytes, num_bytes: int) -> bytes:
    return b"[" + item * (num_bytes // len(item)) + item[:-1] + b"]"


SHAPES: Mapping[str, Callable[[int], bytes]] = {
    "long": lambda n: b'"' + b"a" * n + b'"',
    "words": lambda n: b'"' + b"word " * (n // 5) + b'"',
    "accents": lambda n: b'"' + "é".encode() * (n // 2) + b'"',
    "escapes": lambda n: b'"' + b"\\u00e9" * (n // 6) + b'"',
    "blanks": lambda n: b" " * n + b'"x"',
    "strings": lambda n: _repeated(b'"x",', n),
    "numbers": lambda n: _repeated(b"7,", n),
    "lists": lambda n: _repeated(b"[],", n),
    "objects": lambda n: _repeated(b"{},", n),
    "messages": lambda n: _repeated(b'{"role":"user","content":"x"},', n),
    "deep": lambda n: b"[" * (n // 2) + b"]" * (n // 2),
    "many": lambda n: b"{" + b",".join(b'"%d":1' % i for i in range(n // 9)) + b"}",
    "twice": lambda n: b"{" + b'"a":1,' * (n // 6) + b'"a":1}',
}
"""JSON values by about how many bytes they have."""


def grown(body: Mapping[str, Any], name: str, shape: str, num_bytes: int) -> bytes:
    """A body whose field ``name``, of its parameters if they have it, is that large."""
    changed = json.loads(json.dumps(body))
    inner = changed.get("parameters")
    (inner if isinstance(inner, dict) and name in inner else changed)[name] = _MARK
    return (
        json.dumps(changed).encode().replace(json.dumps(_MARK).encode(), SHAPES[shape](num_bytes))
    )
