"""Settings of all sources merged by precedence into typed values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from lmi_core.config.problem import Problems
from lmi_core.config.sources.origin import COMMAND_LINE, Precedence, Setting
from lmi_core.config.table import BY_KEY, suggest_key
from lmi_core.config.table.option import Option

SECRET = "********"


@dataclass(frozen=True, slots=True)
class Value:
    """The typed value of an option, where it was written, and what it overrides."""

    option: Option
    value: object
    setting: Setting
    overridden: tuple[Setting, ...] = ()

    @property
    def shown(self) -> str:
        """The value as text for a message; secrets are masked."""
        return SECRET if self.option.secret else self.setting.shown


@dataclass(slots=True)
class Values:
    """Values by key, the settings of unknown keys, and those whose value is impossible.

    ``ignored`` says of keys that are given, but don't count, why they don't; ``refused`` of those
    whose value doesn't go with other keys' why it doesn't.
    """

    known: dict[str, Value] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, Setting] = field(default_factory=dict)
    impossible: list[tuple[Setting, str]] = field(default_factory=list)

    def get(self, key: str) -> object:
        """Return the value given for ``key``, or None."""
        value = self.known.get(key)
        return None if value is None or key in self.ignored else value.value

    def used(self) -> list[Value]:
        """Return the values that count, the strongest source first."""
        values = [value for key, value in self.known.items() if key not in self.ignored]
        return sorted(values, key=lambda value: value.setting.precedence, reverse=True)

    def where(self, key: str) -> str:
        """Return where ``key`` was given, or an empty text."""
        value = self.known.get(key)
        return "" if value is None else value.setting.where

    def precedence(self, key: str) -> Precedence:
        """Return how strong the source of ``key`` is."""
        value = self.known.get(key)
        return Precedence.DEFAULT if value is None else value.setting.precedence


def merge(settings: Iterable[Setting], problems: Problems, *, strict: bool = False) -> Values:
    """Return the strongest setting of every key, parsed; faults go to ``problems``.

    Of equally strong settings the regular spelling wins over others (un-prefixed over prefixed),
    else the first variable, the last line and the last flag. Two ``option.`` spellings that differ
    are an error.
    """
    by_key: dict[str, list[Setting]] = {}
    values = Values()
    for setting in settings:
        option = BY_KEY.get(setting.key)
        if option is None:
            _unknown(setting, values, problems, strict)
        elif not setting.text.strip():
            problems.warn(setting.where, f"{setting.key} has no value; it is not used", setting.key)
        else:
            by_key.setdefault(option.key, []).append(setting)
    for key, candidates in by_key.items():
        _choose(BY_KEY[key], candidates, values, problems)
    return values


def _choose(option: Option, candidates: list[Setting], values: Values, problems: Problems) -> None:
    flags = [setting for setting in candidates if setting.precedence in COMMAND_LINE]
    others = [setting for setting in candidates if setting.precedence not in COMMAND_LINE]
    equals = [*reversed(flags), *others]
    ordered = sorted(equals, key=lambda s: (s.precedence, s.key == option.key), reverse=True)
    parsed: list[tuple[Setting, object]] = []
    for setting in ordered:
        try:
            parsed.append((setting, option.type.parse(setting.text)))
        except ValueError as error:
            shown = SECRET if option.secret else setting.shown
            problems.value_error(setting, error, shown)
            values.impossible.append((replace(setting, text=shown), str(error)))
    if not parsed or parsed[0][0] is not ordered[0]:
        return
    winner, value = parsed[0]
    values.known[option.key] = Value(option, value, winner, tuple(ordered[1:]))
    for setting, other in parsed[1:]:
        is_equal = setting.precedence == winner.precedence
        if is_equal and other != value and _are_spellings(winner, setting):
            _conflict(winner, setting, problems)


def _are_spellings(first: Setting, second: Setting) -> bool:
    """Tell whether two keys are equals; an un-prefixed one is stronger than its prefixed twin."""
    both = first.key.startswith("option.") and second.key.startswith("option.")
    return both and first.key != second.key


def _conflict(winner: Setting, other: Setting, problems: Problems) -> None:
    message = (
        f"{winner.key}={winner.shown!r} and {other.key}={other.shown!r} ({other.where}) are two "
        "spellings of one option with different values; keep one"
    )
    problems.error(winner.where, message, winner.key)


def _unknown(setting: Setting, values: Values, problems: Problems, strict: bool) -> None:
    near = suggest_key(setting.key)
    hint = f"did you mean {near}?" if near else "only custom code or another engine may know it"
    report = problems.error if strict else problems.warn
    report(setting.where, f"unknown key {setting.key[:80]!r}; {hint}", setting.key)
    values.unknown[setting.key] = setting
