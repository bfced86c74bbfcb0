"""Structural tags: text of which parts are free and others follow a grammar.

The formats are XGrammar's (https://xgrammar.mlc.ai, "Structural Tag"), by which vLLM and SGLang
take them, and the older form of ``structures`` and ``triggers``. A text that is free ends where
what comes next begins for the first time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from lmi_core.errors import UserError
from lmi_core.structured.grammar import Grammar
from lmi_core.structured.marks import ANY_TEXT, nested_grammar, quote_mark, text_before_mark

_MAX_DEPTH = 16


def structural_tag(tag: Any, *, field: str) -> Grammar:
    """The grammar of a tag: an object, or its JSON text. UserError names what is wrong in it."""
    if isinstance(tag, str):
        try:
            tag = json.loads(tag)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{field} isn't JSON: {error}", field=field) from None
    rules = _Rules(field)
    if not isinstance(tag, Mapping):
        rules.refuse("", "an object with a format, or with structures and triggers", tag)
    if "structures" in tag or "triggers" in tag:
        start = rules.triggered(_of_older(rules, tag), "")
    else:
        start = rules.of(tag.get("format"), ".format")
    return Grammar.lark("\n".join([f"start: {start}", *rules.rules]), field=field)


def _of_older(rules: _Rules, tag: Mapping[str, Any]) -> dict[str, Any]:
    tags = []
    for index, each in enumerate(rules.listed(tag, "structures", "")):
        where = f".structures[{index}]"
        if not isinstance(each, Mapping) or "schema" not in each:
            rules.refuse(where, 'an object with "begin", "schema" and "end"', each)
        content = {"type": "json_schema", "json_schema": each["schema"]}
        tags.append({"begin": each.get("begin"), "content": content, "end": each.get("end")})
    return {"triggers": tag.get("triggers"), "tags": tags}


class _Rules:
    """Rules in Lark's notation; each method gives the right side of what it is asked for."""

    def __init__(self, field: str) -> None:
        self.rules: list[str] = []
        self._field = field
        self._depth = 0

    def refuse(self, where: str, allowed: str, value: object) -> NoReturn:
        name = f"{self._field}{where}"
        raise UserError(f"{name} must be {allowed}, got {str(value)[:60]!r}", field=self._field)

    def listed(self, value: Mapping[str, Any], name: str, where: str) -> Sequence[Any]:
        given = value.get(name)
        if not isinstance(given, list) or not given:
            self.refuse(f"{where}.{name}", "a list, not empty", given)
        return given

    def of(self, value: Any, where: str, *, is_last: bool = True) -> str:
        """A format; ``is_last``: nothing follows, so that it may end with free text."""
        kind = _kind(value)
        make = _FORMATS.get(kind)
        if make is None:
            self.refuse(where, f"an object whose type is {', '.join(_FORMATS)}", kind or value)
        if not is_last and self._is_open(value):
            raise UserError(
                f"{self._field}{where} may end with any text: it can come last only, or any_text "
                "right before a const_string or a tag",
                field=self._field,
            )
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise UserError(
                f"{self._field} is nested more than {_MAX_DEPTH} deep", field=self._field
            )
        made = make(self, value, where)
        self._depth -= 1
        return made

    def _is_open(self, value: Any, depth: int = _MAX_DEPTH) -> bool:
        """Whether it may end with free text; what is too deep is refused elsewhere."""
        if not depth:
            return False
        match _kind(value):
            case "any_text":
                return True
            case "triggered_tags":
                return not (value.get("at_least_one") and value.get("stop_after_first"))
            case "tag":
                return not value.get("end") and self._is_open(value.get("content"), depth - 1)
            case "or" | "sequence" as kind:
                inner = value.get("elements")
                inner = inner if isinstance(inner, list) else []
                ends = inner[-1:] if kind == "sequence" else inner
                return any(self._is_open(each, depth - 1) for each in ends)
        return False

    def const_string(self, value: Mapping[str, Any], where: str) -> str:
        return quote_mark(self._text(value, "value", where))

    def json_schema(self, value: Mapping[str, Any], where: str) -> str:
        schema = value.get("json_schema")
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            self.refuse(f"{where}.json_schema", "a schema object", schema)
        text = Grammar.json_schema(
            {"x-guidance": {"whitespace_pattern": "[ ]?"}, **schema}, field=self._field
        ).text
        return self._rule(f"%json {text}")

    def regex(self, value: Mapping[str, Any], where: str) -> str:
        return self._rule(f"/{self._pattern(value, where)}/", is_terminal=True)

    def grammar(self, value: Mapping[str, Any], where: str) -> str:
        return self._rule(nested_grammar(self._text(value, "grammar", where)))

    def any_text(self, value: Mapping[str, Any], where: str) -> str:
        return f"{self.regex(value, where)}?"

    def sequence(self, value: Mapping[str, Any], where: str) -> str:
        elements = self.listed(value, "elements", where)
        parts, before = [], None
        for index, element in enumerate(elements):
            place = f"{where}.elements[{index}]"
            following = _kind(elements[index + 1]) if index + 1 < len(elements) else None
            if before is not None and _kind(element) == "tag":
                parts.append(self.tag(element, place, before=before))
            elif before is not None:
                parts.append(self._text_before(self._text(element, "value", place), before))
            elif _kind(element) in _PATTERNS and following in ("const_string", "tag"):
                before = self._pattern(element, place)
                continue
            else:
                parts.append(self.of(element, place, is_last=following is None))
            before = None
        return self._rule(" ".join(parts))

    def either(self, value: Mapping[str, Any], where: str) -> str:
        elements = self.listed(value, "elements", where)
        parts = [self.of(each, f"{where}.elements[{i}]") for i, each in enumerate(elements)]
        return self._rule(" | ".join(parts))

    def tag(
        self,
        value: Mapping[str, Any],
        where: str,
        *,
        behind: str = "",
        before: str | None = None,
    ) -> str:
        """``behind``: what of the beginning has come; ``before``: a pattern of what may."""
        begin = self._text(value, "begin", where).removeprefix(behind)
        ends = value.get("end", "")
        ends = [ends] if isinstance(ends, str) else ends
        if not (isinstance(ends, list) and ends and all(isinstance(end, str) for end in ends)):
            self.refuse(f"{where}.end", "a text, or a list of texts", ends)
        head = quote_mark(begin) if before is None else self._text_before(begin, before)
        content = value.get("content")
        if isinstance(content, Mapping) and _kind(content) in _PATTERNS and all(ends):
            pattern = self._pattern(content, f"{where}.content")
            tails = [self._text_before(end, pattern) for end in ends]
        else:
            head += " " + self.of(content, f"{where}.content", is_last=not any(ends))
            tails = [quote_mark(end) for end in ends]
        return self._rule(f"{head} ({' | '.join(tails)})")

    def triggered(self, value: Mapping[str, Any], where: str) -> str:
        self._refuse_excludes(value, where)
        tags = self.listed(value, "tags", where)
        triggers = self.listed(value, "triggers", where)
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            self.refuse(f"{where}.triggers", "a list of texts that aren't empty", triggers)
        behind: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for index, tag in enumerate(tags):
            place = f"{where}.tags[{index}]"
            begin = self._text(tag, "begin", place)
            trigger = next((text for text in triggers if begin.startswith(text)), None)
            if trigger is None:
                self.refuse(f"{place}.begin", f"a text that begins with one of {triggers}", begin)
            behind[trigger].append(self.tag(tag, place, behind=trigger))
        pieces = [
            self._rule(f"{self._text_before(trigger)} ({' | '.join(rests)})")
            for trigger, rests in behind.items()
            if rests
        ]
        piece = self._rule(" | ".join(pieces))
        first = ""
        if value.get("at_least_one"):
            whole = [self.tag(tag, f"{where}.tags[{i}]") for i, tag in enumerate(tags)]
            first = self._rule(" | ".join(whole))
        free = f"{self._free_text()}?"
        if value.get("stop_after_first"):
            return first or self._rule(f"{piece} | {free}")
        return self._rule(f"{first} {piece}* {free}")

    def separated(self, value: Mapping[str, Any], where: str) -> str:
        tags = self.listed(value, "tags", where)
        one = self._rule(
            " | ".join(self.tag(tag, f"{where}.tags[{i}]") for i, tag in enumerate(tags))
        )
        more = quote_mark(self._text(value, "separator", where))
        whole = one if value.get("stop_after_first") else f"{one} ({more} {one})*"
        return self._rule(whole if value.get("at_least_one") else f"({whole})?")

    def _pattern(self, value: Mapping[str, Any], where: str) -> str:
        """Of a regex or of any text."""
        self._refuse_excludes(value, where)
        if value["type"] == "any_text":
            return ANY_TEXT
        pattern = self._text(value, "pattern", where)
        escaped = pattern.replace("\\/", "/").replace("/", r"\/").replace("\n", r"\n")
        return f"(?:{escaped})"

    def _refuse_excludes(self, value: Mapping[str, Any], where: str) -> None:
        if value.get("excludes"):
            raise UserError(
                f"{self._field}{where}.excludes is not available in this version; leave it out",
                field=self._field,
            )

    def _text(self, value: Any, name: str, where: str) -> str:
        given = value.get(name) if isinstance(value, Mapping) else None
        if not isinstance(given, str):
            self.refuse(f"{where}.{name}", "a text", given)
        return given

    def _text_before(self, text: str, pattern: str = ANY_TEXT) -> str:
        return self._rule(text_before_mark(text, pattern))

    def _free_text(self) -> str:
        return self._rule(f"/{ANY_TEXT}/", is_terminal=True)

    def _rule(self, right: str, *, is_terminal: bool = False) -> str:
        name = f"{'T' if is_terminal else 'r'}{len(self.rules)}"
        self.rules.append(f"{name}: {right}")
        return name


def _kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else None
    return kind if isinstance(kind, str) else ""


_PATTERNS = ("any_text", "regex")
_FORMATS: Mapping[str, Callable[[_Rules, Mapping[str, Any], str], str]] = {
    "const_string": _Rules.const_string,
    "json_schema": _Rules.json_schema,
    "regex": _Rules.regex,
    "grammar": _Rules.grammar,
    "any_text": _Rules.any_text,
    "sequence": _Rules.sequence,
    "or": _Rules.either,
    "tag": _Rules.tag,
    "triggered_tags": _Rules.triggered,
    "tags_with_separator": _Rules.separated,
}
