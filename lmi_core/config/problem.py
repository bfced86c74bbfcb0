"""Faults of a configuration, collected so that all of them are reported together."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from lmi_core.config.sources.origin import Setting
from lmi_core.errors import ConfigError


class Severity(StrEnum):
    """An error refuses the configuration; a warning doesn't."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault: where it was written, which key (or None), and what to change."""

    severity: Severity
    where: str
    key: str | None
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message


@dataclass(slots=True)
class Problems:
    """Collects faults while a configuration is read."""

    items: list[Problem] = field(default_factory=list)

    def error(self, where: str, message: str, key: str | None = None) -> None:
        """Note a fault that refuses the configuration."""
        self.add(Problem(Severity.ERROR, where, key, message))

    def warn(self, where: str, message: str, key: str | None = None) -> None:
        """Note a fault that the configuration survives."""
        self.add(Problem(Severity.WARNING, where, key, message))

    def value_error(self, setting: Setting, reason: object, shown: str) -> None:
        """Note that a setting's value is impossible."""
        self.error(setting.where, f"{setting.key}={shown!r} {reason}", setting.key)

    def add(self, problem: Problem) -> None:
        """Note a fault, once."""
        if problem not in self.items:
            self.items.append(problem)

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The faults that refuse the configuration."""
        return tuple(p for p in self.items if p.severity is Severity.ERROR)

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """The faults that the configuration survives."""
        return tuple(p for p in self.items if p.severity is Severity.WARNING)

    def raise_errors(self) -> None:
        """Raise ConfigError with every error, if there is one."""
        if not self.errors:
            return
        lines = tuple(str(problem) for problem in self.errors)
        head = "the configuration can't be used:" if len(lines) > 1 else "configuration:"
        raise ConfigError(
            "\n  ".join((head, *lines)) if len(lines) > 1 else f"{head} {lines[0]}",
            problems=lines,
            field=self.errors[0].key,
        )
