"""Ratios of the rows as an SVG picture: a dot for the median, a bar between the quartiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from bench.peers.row import Row

LABEL_WIDTH, PLOT_WIDTH, VALUE_WIDTH = 300, 480, 60
LINE_HEIGHT, TOP = 22, 40
AHEAD, BEHIND = "#1b7837", "#b2182b"
TITLE = "ours / theirs, tokens per second (right of 1: ahead)"
TICKS = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0, 32.0)


def svg(rows: Sequence[Row]) -> str:
    """The picture; rows without a pair are left out. Ratios are on a logarithmic axis."""
    rows = [row for row in rows if row.pairs]
    ends = [1.0, *(end for row in rows for end in (row.ratio.low, row.ratio.high))]
    low, high = math.log(min(ends) / 1.1), math.log(max(ends) * 1.1)

    def x_of(ratio: float) -> float:
        return LABEL_WIDTH + PLOT_WIDTH * (math.log(ratio) - low) / (high - low)

    width = LABEL_WIDTH + PLOT_WIDTH + VALUE_WIDTH
    bottom = TOP + LINE_HEIGHT * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 30}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LABEL_WIDTH}" y="18">{TITLE}</text>',
    ]
    for tick in TICKS:
        if low <= math.log(tick) <= high:
            parts.append(_tick(x_of(tick), tick, bottom))
    for i, row in enumerate(rows):
        parts += _line(row, TOP + LINE_HEIGHT * i + LINE_HEIGHT / 2, x_of)
    return "\n".join([*parts, "</svg>\n"])


def _tick(x: float, ratio: float, bottom: float) -> str:
    colour = "#444" if ratio == 1 else "#ddd"
    return (
        f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="{colour}"/>'
        f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{ratio:g}</text>'
    )


def _line(row: Row, y: float, x_of: Callable[[float], float]) -> list[str]:
    ratio = row.ratio
    colour = AHEAD if ratio.median >= 1 else BEHIND
    label = escape(f"{row.shape} {row.dtype} {row.what}, {row.peer}")
    return [
        f'<text x="{LABEL_WIDTH - 10}" y="{y + 4:.1f}" text-anchor="end">{label}</text>',
        f'<line x1="{x_of(ratio.low):.1f}" y1="{y:.1f}" x2="{x_of(ratio.high):.1f}" y2="{y:.1f}" '
        f'stroke="{colour}" stroke-width="4" stroke-opacity="0.4"/>',
        f'<circle cx="{x_of(ratio.median):.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>',
        f'<text x="{LABEL_WIDTH + PLOT_WIDTH + 10}" y="{y + 4:.1f}">{ratio.median:.2f}</text>',
    ]
