"""How large a grammar is once it is written out: what is refused before it is compiled."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from lmi_core.errors import UserError
from lmi_core.structured.grammar import Grammar, GrammarKind

MAX_CHOICES = 1990
"""The library keeps 2000 possibilities beside each other, some of which a grammar has anyway."""
MAX_REPEATED, MAX_NESTED = 40_000, 10_000
"""Characters of a pattern with its repetitions written out; fewer where repetitions are repeated:
(a{100}){100} takes 2 ms for a mask, (a{200}){200} 9 ms and .{1,40000} 0.7 ms."""
_MAX_SHOWN = 40
# What doesn't end reaches to the text's end, so that the search is linear.
_TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+\]?|\{(\d*+)(,?)(\d*+)\}|[()|]|[^\\\[()|{]+|.", re.DOTALL
)
_JSON_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_COUNTED = re.compile(r"\{\d")


def check_size(grammar: Grammar) -> None:
    """Raise UserError for a grammar that would take too long; linear in its length."""
    if grammar.kind is GrammarKind.CHOICE:
        num_choices = len(json.loads(grammar.text))
        if num_choices > MAX_CHOICES:
            raise UserError(
                f"{grammar.field} has {num_choices} choices; at most {MAX_CHOICES} are allowed",
                field=grammar.field,
            )
        return
    for pattern in _patterns(grammar):
        size, is_nested = repeated_size(pattern)
        most = MAX_NESTED if is_nested else MAX_REPEATED
        if size > most:
            raise UserError(
                f"{grammar.field} can't be used: {pattern[:_MAX_SHOWN]!r} has {size} characters "
                f"with its repetitions written out; at most {most} are allowed",
                field=grammar.field,
            )


def _patterns(grammar: Grammar) -> Iterator[str]:
    """The parts that may repeat something: a regex, a schema's texts, a grammar's lines."""
    if not _COUNTED.search(grammar.text):
        return
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        for match in _JSON_STRING.finditer(grammar.text):
            if _COUNTED.search(match[0]):
                yield match[0]
    elif grammar.kind is GrammarKind.REGEX:
        yield grammar.text
    else:
        yield from grammar.text.splitlines()


def repeated_size(pattern: str) -> tuple[int, bool]:
    """Atoms of a regex, those of a group as often as it is repeated, and whether such a group has
    repetitions of its own."""
    outer: list[tuple[int, bool]] = []
    size = last = 0
    has_counts = last_has = is_nested = False
    for match in _TOKEN.finditer(pattern):
        token = match[0]
        if token == "(":
            outer.append((size, has_counts))
            size = last = 0
            has_counts = False
        elif token == ")" and outer:
            last, last_has = size, has_counts
            before, had_counts = outer.pop()
            size += before
            has_counts |= had_counts
        elif match[1] or match[3]:
            times = max(1, *(int(number[:9]) for number in (match[1], match[3]) if number))
            is_nested |= last_has and times > 1
            has_counts |= times > 1
            size += last * (times - 1)
            last *= times
        else:
            size += len(token) if len(token) > 1 and token[0] not in "\\[" else 1
            last, last_has = 1, False
    return size + sum(before for before, _ in outer), is_nested
