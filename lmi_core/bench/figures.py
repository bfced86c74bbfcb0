"""Figures of runs: medians and spreads, as a table, as data."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmi_core.bench.stream import Answer


@dataclass(slots=True)
class Figure:
    """One quantity of several runs; ``shares`` are parts of the machine's roof, if it has one."""

    name: str
    unit: str
    values: list[float]
    shares: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def share(self) -> float | None:
        return statistics.median(self.shares) if self.shares else None

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "median": self.median,
            "lowest": min(self.values),
            "highest": max(self.values),
            "runs": self.values,
            "share_of_roof": self.share,
        }


@dataclass(slots=True)
class Run:
    """What one pass over a workload gave."""

    seconds: float
    answers: list[Answer]
    failures: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, tuple[str, float]]:
        """Name -> unit, value."""
        answers = [answer for answer in self.answers if answer.num_tokens]
        first_ms = [1e3 * (a.first_at - a.sent_at) for a in answers]
        per_token_ms = [
            1e3 * (a.last_at - a.first_at) / (a.num_tokens - 1) for a in answers if a.num_tokens > 1
        ]
        gaps_ms = [1e3 * gap for a in answers for gap in a.intervals_s]
        whole_ms = [1e3 * (a.last_at - a.sent_at) for a in answers]
        rates = {
            "requests": ("1/s", len(answers) / self.seconds),
            "output": ("tokens/s", sum(a.num_tokens for a in answers) / self.seconds),
        }
        prompts = [a.num_prompt_tokens for a in answers if a.num_prompt_tokens is not None]
        if prompts and len(prompts) == len(answers):
            total = sum(prompts) + sum(a.num_tokens for a in answers)
            rates["prompts and output"] = ("tokens/s", total / self.seconds)
        times = {
            "time to first token": first_ms,
            "time per output token": per_token_ms,
            "between tokens": gaps_ms,
            "whole request": whole_ms,
        }
        for name, values in times.items():
            if values:
                rates[f"{name}, mean"] = ("ms", statistics.fmean(values))
                rates[f"{name}, median"] = ("ms", statistics.median(values))
                rates[f"{name}, 99 %"] = ("ms", percentile(values, 0.99))
        return rates


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that is at least as large as ``share`` of them; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def figures_of(runs: Sequence[Run]) -> list[Figure]:
    """Those that every run has."""
    found = [run.figures() for run in runs]
    names = [name for name in found[0] if all(name in each for each in found)]
    return [Figure(name, found[0][name][0], [each[name][1] for each in found]) for name in names]


def table(figures: Sequence[Figure], against: Sequence[Figure] = (), other: str = "") -> str:
    """A Markdown table; with ``against`` the other server's medians and the ratio to them."""
    has_share = any(figure.shares for figure in figures)
    headings = ["", "median", "lowest to highest", *(["of the roof"] if has_share else [])]
    headings += [other, "ratio"] if against else []
    others = {figure.name: figure for figure in against}
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)]]
    for figure in figures:
        cells = [f"{figure.name} ({figure.unit})", number(figure.median), _spread(figure)]
        if has_share:
            cells.append("-" if figure.share is None else f"{figure.share:.0%}")
        if against:
            rival = others.get(figure.name)
            cells.append("-" if rival is None else number(rival.median))
            cells.append("-" if rival is None else _ratio(figure, rival))
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def number(value: float) -> str:
    """Three digits or so."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _spread(figure: Figure) -> str:
    return f"{number(min(figure.values))} to {number(max(figure.values))}"


def _ratio(figure: Figure, rival: Figure) -> str:
    if not rival.median:
        return "-"
    ratio = figure.median / rival.median
    apart = _apart(figure.values, rival.values)
    return f"{ratio:.2f}" + ("" if apart else " (within the spread)")


def _apart(first: Iterable[float], second: Iterable[float]) -> bool:
    a, b = sorted(first), sorted(second)
    return a[-1] < b[0] or b[-1] < a[0]
