"""Types of option values: how each is written in a text source, parsed and described."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, Protocol

TRUE_WORDS = frozenset({"true", "1", "yes", "on", "t", "y"})
FALSE_WORDS = frozenset({"false", "0", "no", "off", "f", "n"})
INT64_MAX = 2**63 - 1

_BYTES = re.compile(r"([0-9]{1,20})(?:([kKmMgGtT])(?:i?[bB])?)?", re.ASCII)
_SHIFTS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_RATE = re.compile(
    r"(?P<count>[0-9]{1,9})"
    r"(/(?P<duration>P((?P<days>[0-9]{1,5})D)?"
    r"(T((?P<hours>[0-9]{1,6})H)?((?P<minutes>[0-9]{1,8})M)?"
    r"((?P<seconds>[0-9]{1,9}(\.[0-9]{1,9})?)S)?)?))?",
    re.ASCII,
)
_INTEGER = re.compile(r"[+-]?[0-9]{1,40}", re.ASCII)
_SCALED = re.compile(r"([0-9]{1,19})(?:\.([0-9]{1,12}))?([kKmMgGtT])", re.ASCII)
_DECIMAL = {"k": 3, "m": 6, "g": 9, "t": 12}


class ValueType(Protocol):
    """Parses the text of one value; ``parse`` raises ValueError that says what is allowed."""

    def parse(self, text: str) -> object:
        """Return the typed value of ``text``."""
        ...

    def describe(self) -> str:
        """Name what is allowed, for help and the reference page."""
        ...


@dataclass(frozen=True, slots=True)
class Text:
    """Any text; ``what`` says of which kind (path, hub id, name)."""

    what: str = "text"

    def parse(self, text: str) -> str:
        if not text:
            raise ValueError(f"must not be empty, allowed is a {self.what}")
        if "\0" in text:
            raise ValueError("must not contain a NUL character")
        return text

    def describe(self) -> str:
        return self.what


@dataclass(frozen=True, slots=True)
class Bool:
    """A truth value in the spellings that pydantic accepts."""

    def parse(self, text: str) -> bool:
        word = text.strip().lower()
        if word in TRUE_WORDS:
            return True
        if word in FALSE_WORDS:
            return False
        raise ValueError("is not a truth value, write true or false")

    def describe(self) -> str:
        return "true, false"


@dataclass(frozen=True, slots=True)
class Int:
    """An integer in a closed range, or one of a few ``words`` such as ``max``."""

    minimum: int | None = None
    maximum: int = INT64_MAX
    words: tuple[str, ...] = ()

    def parse(self, text: str) -> int | str:
        word = text.strip()
        if word.lower() in self.words:
            return word.lower()
        if not _INTEGER.fullmatch(word):
            raise ValueError(f"is not {self.describe()}")
        value = int(word)
        if value > INT64_MAX:
            raise ValueError(f"is out of range, allowed is at most {INT64_MAX}")
        if value > self.maximum or (self.minimum is not None and value < self.minimum):
            raise ValueError(f"is out of range, allowed is {self.describe()}")
        return value

    def describe(self) -> str:
        if self.minimum is not None and self.maximum < INT64_MAX:
            span = f"integer {self.minimum} to {self.maximum}"
        elif self.minimum is not None:
            span = f"integer >= {self.minimum}"
        else:
            span = "integer"
        return " or ".join((span, *self.words))


@dataclass(frozen=True, slots=True)
class ScaledInt:
    """A positive integer as vLLM's command line has it: 4k is 4000, 1.5k is 1500 and 4K is 4096;
    ``has_auto``: or -1, which is the word auto.

    Source: ``human_readable_int_or_auto`` of vLLM's arg_utils.py.
    """

    has_auto: bool = False

    def parse(self, text: str) -> int | str:
        word = text.strip()
        if self.has_auto and word.lower() in ("auto", "-1"):
            return "auto"
        if match := _SCALED.fullmatch(word):
            value = self._scaled(match[1], match[2] or "", match[3])
        elif _INTEGER.fullmatch(word):
            value = int(word)
        else:
            raise ValueError(f"is not {self.describe()}")
        if not 1 <= value <= INT64_MAX:
            raise ValueError(f"is out of range, allowed is {self.describe()}")
        return value

    def _scaled(self, whole: str, fraction: str, unit: str) -> int:
        if unit.isupper() and fraction:
            raise ValueError(
                f"has a fraction of {unit}, which is a power of 1024: write "
                f"{whole}.{fraction}{unit.lower()}, a power of 1000, or a whole number"
            )
        if unit.isupper():
            return int(whole) << _SHIFTS[unit.lower()]
        return int(int(whole + fraction) * 10 ** _DECIMAL[unit] // 10 ** len(fraction))

    def describe(self) -> str:
        span = "integer >= 1, such as 4000, 4k (the same) or 4K (4096)"
        return f"{span}, or auto" if self.has_auto else span


@dataclass(frozen=True, slots=True)
class Bytes:
    """A number of bytes, such as 4096, 512M or 2GiB (powers of 1024)."""

    def parse(self, text: str) -> int:
        match = _BYTES.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"is not {self.describe()}")
        value = int(match[1]) << _SHIFTS[(match[2] or "").lower()]
        if not 0 < value <= INT64_MAX:
            raise ValueError(f"is out of range, allowed is {self.describe()}")
        return value

    def describe(self) -> str:
        return "number of bytes such as 512M"


@dataclass(frozen=True, slots=True)
class Rate:
    """A count, or a count and an ISO 8601 duration such as 10/PT30S; a minute without one.

    Parsed to the count and the duration in seconds.
    """

    def parse(self, text: str) -> tuple[int, float]:
        match = _RATE.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"is not {self.describe()}")
        if match["duration"] is None:
            return int(match["count"]), 60.0
        units = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
        seconds = sum(float(match[name] or 0) * unit for name, unit in units)
        if seconds <= 0:
            raise ValueError(f"has a duration of 0, allowed is {self.describe()}")
        return int(match["count"]), seconds

    def describe(self) -> str:
        return "number, or number/duration such as 10/PT30S"


@dataclass(frozen=True, slots=True)
class Float:
    """A finite number in a range whose lower end may be excluded."""

    minimum: float = -math.inf
    maximum: float = math.inf
    above: bool = False

    def parse(self, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"is not a {self.describe()}") from None
        low_ok = value > self.minimum if self.above else value >= self.minimum
        if not (math.isfinite(value) and low_ok and value <= self.maximum):
            raise ValueError(f"is out of range, allowed is a {self.describe()}")
        return value

    def describe(self) -> str:
        if math.isfinite(self.minimum) and math.isfinite(self.maximum):
            low = f"above {self.minimum:g} to" if self.above else f"{self.minimum:g} to"
            return f"number {low} {self.maximum:g}"
        if math.isfinite(self.minimum):
            return f"number {'>' if self.above else '>='} {self.minimum:g}"
        return "number"


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words; matched without regard to case unless ``exact``."""

    choices: tuple[str, ...]
    exact: bool = False

    def parse(self, text: str) -> str:
        word = text.strip()
        for choice in self.choices:
            if word == choice or (not self.exact and word.lower() == choice.lower()):
                return choice
        raise ValueError(f"is not one of {', '.join(self.choices)}")

    def describe(self) -> str:
        return ", ".join(self.choices)


@dataclass(frozen=True, slots=True)
class Items:
    """A list of values separated by one character; empty items are errors."""

    item: ValueType
    separator: str = ","

    def parse(self, text: str) -> tuple[object, ...]:
        return tuple(self.item.parse(part.strip()) for part in text.split(self.separator))

    def describe(self) -> str:
        return f"list of {self.item.describe()}, separated by '{self.separator}'"


@dataclass(frozen=True, slots=True)
class Json:
    """A JSON document, kept as the text it was written as; ``of_object``: an object, or one of
    ``words``, as which it is kept."""

    of_object: bool = False
    words: tuple[str, ...] = ()

    def parse(self, text: str) -> str:
        if (word := text.strip()) in self.words:
            return word
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            if self.words:
                raise ValueError(f"is not {self.describe()}") from None
            raise ValueError(f"is not valid JSON ({error})") from None
        if self.of_object and not isinstance(value, dict):
            raise ValueError(f"is not {self.describe()}")
        return text

    def describe(self) -> str:
        return " or ".join((*self.words, "a JSON object" if self.of_object else "JSON"))


@dataclass(frozen=True, slots=True)
class StopList:
    """The literal ``["a", "b"]`` of ``option.stop_sequence``, read as JSON or with plain quotes.

    The reference splits the text on every comma; a comma inside quotes is kept here.
    """

    def parse(self, text: str) -> tuple[str, ...]:
        body = text.strip()
        if not (body.startswith("[") and body.endswith("]")):
            raise ValueError('is not a list in brackets, write ["a", "b"]')
        try:
            items = json.loads(body)
        except (ValueError, RecursionError):
            items = self._single_quoted(body[1:-1])
        if not all(isinstance(item, str) and item for item in items):
            raise ValueError('is not a list of non-empty quoted texts, write ["a", "b"]')
        return tuple(items)

    def _single_quoted(self, body: str) -> list[str]:
        if not re.fullmatch(r"\s*('[^']*'\s*(,\s*'[^']*'\s*)*)?", body):
            raise ValueError('is not a list of quoted texts, write ["a", "b"]')
        return re.findall(r"'([^']*)'", body)

    def describe(self) -> str:
        return 'list such as ["a", "b"]'


def json_or_text(text: str) -> Any:
    """What a text says in JSON, or the text, where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
