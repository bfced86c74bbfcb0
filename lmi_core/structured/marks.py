"""Marks in grammars of our own making: special tokens where a vocabulary has them, else texts.

A mark stands in a rule behind a control character, which no quoted text holds; what it is shows
when the grammar is compiled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

_MARK, _BEFORE, _NESTED = "\x01", "\x02", "\x03"
_QUOTED = r'("(?:[^"\\]|\\.)*")'
_RULE = re.compile(rf"^(\w+): {_BEFORE}{_QUOTED} {_QUOTED}$", re.MULTILINE)
ANY_TEXT = r"(.|\n)*"
_ANY = re.compile(_MARK + _QUOTED)
_GRAMMAR = re.compile(_NESTED + _QUOTED)


def quote_mark(text: str) -> str:
    """A text in a rule; what is a special token of the model in it is that token."""
    return _MARK + json.dumps(text, ensure_ascii=False)


def text_before_mark(text: str, pattern: str = ANY_TEXT) -> str:
    """The whole right side of a rule: any text, or what matches a ``pattern`` in which slashes are
    escaped, up to and with a mark, the first that comes."""
    return f"{_BEFORE}{json.dumps(text, ensure_ascii=False)} {json.dumps(pattern)}"


def nested_grammar(text: str) -> str:
    """A grammar in Lark's notation or GBNF as a part of a rule."""
    return _NESTED + json.dumps(text, ensure_ascii=False)


class Marks:
    """Those of one vocabulary."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        """``special_tokens``: their ids by their texts."""
        self._ids = special_tokens
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def resolve(self, grammar: str) -> str:
        """The grammar in Lark's notation; ValueError for one within it that can't be read."""
        if _BEFORE in grammar:
            grammar = _RULE.sub(self._before, grammar)
        if _MARK in grammar:
            grammar = _ANY.sub(lambda match: self._quoted(json.loads(match[1])), grammar)
        return _GRAMMAR.sub(_nested, grammar) if _NESTED in grammar else grammar

    def _quoted(self, text: str) -> str:
        parts, end = [], 0
        for match in self._special.finditer(text):
            if match.start() > end:
                parts.append(json.dumps(text[end : match.start()], ensure_ascii=False))
            parts.append(f"<[{self._ids[match[0]]}]>")
            end = match.end()
        if end < len(text) or not text:
            parts.append(json.dumps(text[end:], ensure_ascii=False))
        return " ".join(parts)

    def _before(self, match: re.Match[str]) -> str:
        text, before = json.loads(match[2]), json.loads(match[3])
        special = self._special.search(text)
        if special is None:
            return f"{match[1]}[lazy]: /{before}{_pattern(text)}/"
        # A text has no special tokens in it: the first one ends it.
        ending = _pattern(text[: special.start()])
        return f"{match[1]}: /{before}{ending}/ {self._quoted(text[special.start() :])}"


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def _nested(match: re.Match[str]) -> str:
    from llguidance import gbnf_to_lark

    return f"%lark {{\n{gbnf_to_lark.any_to_lark(json.loads(match[1]))}\n}}"
