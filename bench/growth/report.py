"""Rows as a Markdown table and as a page with a plot of each series, measured beside fitted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from bench.growth.fit import BEND, Fit, fit
from bench.growth.point import SIZES, Point, cost, shape_of

_OTHER = 'fill="none" stroke="#57606a"'
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 460, 260, 60, 12, 40


@dataclass(frozen=True, slots=True)
class Row:
    point: Point
    seconds: tuple[float, ...]
    resident_mb: float
    peer_seconds: tuple[float, ...] = ()
    """Of another engine, in turn with ours; empty where it has no such figure."""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def tokens_per_s(self) -> float:
        """Decoded, or of the prompt's own tokens."""
        point = self.point
        return ((point.prompt - point.shared) or point.batch) / self.median

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the other engine, the median of the pairs; None without it."""
        pairs = zip(self.peer_seconds, self.seconds, strict=True)
        return statistics.median(b / a for b, a in pairs) if self.peer_seconds else None


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    rows: list[Row]
    fit: Fit
    fitted: list[float]
    """Seconds of every row."""


def series_of(rows: Sequence[Row], shape: str, dtype: str) -> list[Series]:
    """Those that have a row, in the order of SIZES."""
    found = []
    for name in SIZES:
        chosen = sorted((r for r in rows if r.point.series == name), key=lambda r: r.point.size)
        if not chosen:
            continue
        costs = [cost(r.point, shape_of(shape, r.point.vocab_size), dtype) for r in chosen]
        if name == "threads":  # that share the work
            costs = [
                (b / r.point.size, o / r.point.size)
                for (b, o), r in zip(costs, chosen, strict=True)
            ]
        model = fit(costs, [row.median for row in chosen])
        found.append(Series(name, chosen, model, [model.seconds(each) for each in costs]))
    return found


def table(series: Sequence[Series]) -> str:
    lines = [
        "| series | size | ms | lowest to highest | tokens/s | of the fit | resident MB | peer |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for each in series:
        for row, fitted in zip(each.rows, each.fitted, strict=True):
            ratio = row.median / fitted if fitted else math.inf
            bend = " (bend)" if abs(ratio - 1) > BEND else ""
            peer = "" if row.ratio is None else f"{row.ratio:.2f}x"
            lines.append(
                f"| {each.name} | {row.point.size} | {1e3 * row.median:.2f} "
                f"| {1e3 * min(row.seconds):.2f} to {1e3 * max(row.seconds):.2f} "
                f"| {row.tokens_per_s:.1f} | {ratio:.2f}{bend} | {row.resident_mb:.0f} | {peer} |"
            )
    lines += ["", *(f"- {each.name}: {each.fit.describe()}" for each in series)]
    return "\n".join(lines) + "\n"


def page(title: str, series: Sequence[Series]) -> str:
    """HTML that needs nothing from elsewhere."""
    plots = "".join(_plot(each) for each in series)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>\n'
        "<style>body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem } figure { margin: 0 }\n"
        ".plots { display: flex; flex-wrap: wrap; gap: 1.5rem } svg { background: #f6f8fa }\n"
        "text { font: 12px system-ui, sans-serif; fill: #57606a }</style>\n"
        f"<h1>{escape(title)}</h1>\n<p>Dots: medians; line: the fitted cost; circles: the other "
        f'engine. Both axes are logarithmic.</p>\n<div class="plots">{plots}</div>\n'
        f"<pre>{escape(table(series))}</pre>\n</html>\n"
    )


class _Axis:
    """A logarithmic one, of values from 0 on: 0 lies where the least of the others is."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        logs = [math.log10(value) for value in values if value > 0] or [0.0]
        self.least, self.most = min(logs), max(logs)
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        log = math.log10(value) if value > 0 else self.least
        share = (log - self.least) / (self.most - self.least) if self.most > self.least else 0.5
        return self.start + (self.end - self.start) * share


def _plot(series: Series) -> str:
    times = [1e3 * second for row in series.rows for second in row.seconds]
    x = _Axis([row.point.size for row in series.rows], _LEFT, _WIDTH - 24)
    others = [1e3 * second for row in series.rows for second in row.peer_seconds]
    y = _Axis([*times, *others, *(1e3 * s for s in series.fitted)], _HEIGHT - _BOTTOM, _TOP)
    line = " ".join(
        f"{x(row.point.size):.1f},{y(1e3 * fitted):.1f}"
        for row, fitted in zip(series.rows, series.fitted, strict=True)
    )
    parts = [f'<polyline points="{line}" fill="none" stroke="#d1690a" stroke-width="2"/>']
    for row in series.rows:
        at, low, high = x(row.point.size), min(row.seconds), max(row.seconds)
        parts.append(
            f'<path d="M{at:.1f} {y(1e3 * low):.1f}V{y(1e3 * high):.1f}" stroke="#1f6feb"/>'
            f'<circle cx="{at:.1f}" cy="{y(1e3 * row.median):.1f}" r="3.5" fill="#1f6feb"/>'
            f'<text x="{at:.1f}" y="{_HEIGHT - 20}" text-anchor="middle">{row.point.size}</text>'
        )
        if row.peer_seconds:
            other = y(1e3 * statistics.median(row.peer_seconds))
            parts.append(f'<circle cx="{at:.1f}" cy="{other:.1f}" r="3.5" {_OTHER}/>')
    for value in {min(times), max(times)}:
        parts.append(f'<text x="4" y="{y(value) + 4:.1f}">{value:.3g} ms</text>')
    kind = "first token" if series.rows[0].point.prompt else "a step"
    caption = f"{series.name}: {kind}; {series.fit.describe()}"
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'role="img" aria-label="{escape(caption)}">{"".join(parts)}</svg>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )
