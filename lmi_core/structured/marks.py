"""Marks in grammars of our own making: special tokens where a vocabulary has them, else texts.

A mark stands in a rule behind a control character, which no quoted text holds; what it is shows
when the grammar is compiled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

_MARK, _BEFORE = "\x01", "\x02"
_QUOTED = r'("(?:[^"\\]|\\.)*")'
_RULE = re.compile(rf"^(\w+): {_BEFORE}{_QUOTED}$", re.MULTILINE)
_ANY = re.compile(_MARK + _QUOTED)


def quote_mark(text: str) -> str:
    """A mark in a rule."""
    return _MARK + json.dumps(text, ensure_ascii=False)


def text_before_mark(text: str) -> str:
    """The whole right side of a rule: any text up to and with a mark, the first that comes."""
    return _BEFORE + json.dumps(text, ensure_ascii=False)


def resolve_marks(grammar: str, special_id: Callable[[str], int | None]) -> str:
    """The grammar in Lark's notation; ``special_id``: the id of a special token by its text."""
    if _MARK not in grammar and _BEFORE not in grammar:
        return grammar

    def mark(match: re.Match[str]) -> str:
        token_id = special_id(json.loads(match[1]))
        return match[1] if token_id is None else f"<[{token_id}]>"

    def before(match: re.Match[str]) -> str:
        text = json.loads(match[2])
        token_id = special_id(text)
        if token_id is None:
            ending = re.escape(text).replace("/", r"\/")
            return f"{match[1]}[lazy]: /(.|\\n)*{ending}/"
        return f"{match[1]}: /(.|\\n)*/ <[{token_id}]>"

    return _ANY.sub(mark, _RULE.sub(before, grammar))
