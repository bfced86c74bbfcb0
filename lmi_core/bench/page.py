"""Results as one page of HTML with plots, which needs nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from lmi_core.bench.figures import Figure, Run, number, percentile

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BOTTOM = 460, 240, 46, 436, 34
_COLOURS = ("#1f6feb", "#d1690a")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem;
  color: #1c2128; background: #fff }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem } figure { margin: 0 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block;
  overflow-x: auto }
td, th { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #d8dee4 }
td:first-child, th:first-child, .facts td { text-align: left } td { white-space: nowrap }
.facts td { white-space: normal }
.plots { display: flex; flex-wrap: wrap; gap: 1.5rem }
svg { background: #f6f8fa; border-radius: 6px; max-width: 100%; height: auto }
text { font: 12px system-ui, sans-serif; fill: #57606a }
figcaption { color: #57606a }
@media (prefers-color-scheme: dark) { body { color: #e6edf3; background: #0d1117 }
  svg { background: #161b22 } text { fill: #9198a1 }
  figcaption { color: #9198a1 } td, th { border-color: #30363d } }
"""


def html(
    title: str,
    facts: Mapping[str, str],
    sides: Mapping[str, Sequence[Figure]],
    runs: Mapping[str, Sequence[Run]],
) -> str:
    """``sides``: figures by what was measured, one or two; ``runs``: their requests, or none."""
    rows = "".join(f"<tr><td>{escape(k)}</td><td>{escape(v)}</td></tr>" for k, v in facts.items())
    plots = [_bars(sides)] if not runs else [_curves(name, what, runs) for name, what in _PLOTTED]
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width">\n'
        f'<style>{_STYLE}</style>\n<h1>{escape(title)}</h1>\n<table class="facts">{rows}</table>\n'
        f'<h2>Plots</h2>\n<div class="plots">{"".join(plots)}</div>\n'
        f"<h2>Figures</h2>\n{_table(sides)}\n</html>\n"
    )


_PLOTTED = (("Time to first token", "first"), ("Time between tokens", "between"))


def _table(sides: Mapping[str, Sequence[Figure]]) -> str:
    names = list(sides)
    head = "".join(f"<th>{escape(name)}</th><th>lowest to highest</th>" for name in names)
    has_share = any(figure.shares for figures in sides.values() for figure in figures)
    head += "<th>of the roof</th>" if has_share else ""
    lines = []
    for figure in sides[names[0]]:
        cells = ""
        for name in names:
            same = next((each for each in sides[name] if each.name == figure.name), None)
            spread = same and f"{number(min(same.values))} to {number(max(same.values))}"
            cells += f"<td>{number(same.median) if same else '-'}</td><td>{spread or '-'}</td>"
        if has_share:
            cells += f"<td>{'-' if figure.share is None else f'{figure.share:.0%}'}</td>"
        lines.append(f"<tr><td>{escape(figure.name)} ({escape(figure.unit)})</td>{cells}</tr>")
    return f"<table><tr><th></th>{head}</tr>{''.join(lines)}</table>"


def _bars(sides: Mapping[str, Sequence[Figure]]) -> str:
    """The median of every figure, and a line from its lowest to its highest run."""
    figures = [(name, figure) for name, each in sides.items() for figure in each]
    most = max((max(figure.values) for _, figure in figures), default=1.0)
    names = list(sides)
    parts = []
    for i, (side, figure) in enumerate(figures):
        y = 24 + 30 * i
        scale = (_WIDTH - 190) / most
        low, middle, high = (
            150 + v * scale for v in (min(figure.values), figure.median, max(figure.values))
        )
        colour = _COLOURS[names.index(side) % len(_COLOURS)]
        parts.append(
            f'<text x="8" y="{y + 12}">{escape(figure.name)}</text>'
            f'<rect x="150" y="{y}" width="{middle - 150:.1f}" height="16" fill="{colour}"/>'
            f'<path d="M{low:.1f} {y + 8}H{high:.1f}" stroke="#57606a" stroke-width="2"/>'
            f'<text x="{high + 4:.1f}" y="{y + 12}">{number(figure.median)}</text>'
        )
    height = 40 + 30 * len(figures)
    unit = figures[0][1].unit if figures else ""
    return _svg("".join(parts), height, f"Median of the runs, {unit}")


def _curves(title: str, what: str, runs: Mapping[str, Sequence[Run]]) -> str:
    """Share of requests or tokens that took at most so long, all runs together."""
    samples = {name: _times_ms(what, each) for name, each in runs.items()}
    most = max((percentile(values, 0.995) for values in samples.values() if values), default=1.0)
    parts = [_axes(most)]
    for i, (name, values) in enumerate(samples.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        # Names are where a curve that rises has already passed.
        y = _HEIGHT - _BOTTOM - 12 - 16 * (len(samples) - 1 - i)
        parts.append(
            f'<polyline points="{_points(values, most)}" fill="none" stroke="{colour}" '
            f'stroke-width="2"/><text x="{_RIGHT}" y="{y}" text-anchor="end" '
            f'style="fill:{colour}">{escape(name)}</text>'
        )
    return _svg("".join(parts), _HEIGHT, f"{title}, ms: share that took at most so long")


def _axes(most: float) -> str:
    shares = "".join(
        f'<path d="M{_LEFT} {_y(share):.1f}H{_RIGHT}" stroke="#8b949e55"/>'
        f'<text x="6" y="{_y(share) + 4:.1f}">{share:.0%}</text>'
        for share in (0.0, 0.5, 0.9, 1.0)
    )
    times = "".join(
        f'<text x="{_x(part):.1f}" y="{_HEIGHT - 12}" text-anchor="middle">'
        f"{number(most * part)}</text>"
        for part in (0.0, 0.5, 1.0)
    )
    return shares + times


def _points(values: Sequence[float], most: float) -> str:
    """A hundred percentiles of the values."""
    if not values or most <= 0:
        return ""
    shares = [i / 100 for i in range(101)]
    return " ".join(
        f"{_x(min(1.0, percentile(values, share) / most)):.1f},{_y(share):.1f}" for share in shares
    )


def _x(part: float) -> float:
    return _LEFT + (_RIGHT - _LEFT) * part


def _y(share: float) -> float:
    return 14 + (_HEIGHT - _BOTTOM - 14) * (1 - share)


def _times_ms(what: str, runs: Sequence[Run]) -> list[float]:
    answers = [answer for run in runs for answer in run.answers if answer.num_tokens]
    if what == "first":
        return [1e3 * (answer.first_at - answer.sent_at) for answer in answers]
    return [1e3 * gap for answer in answers for gap in answer.intervals_s]


def _svg(body: str, height: int, caption: str) -> str:
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(caption)}">{body}</svg>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )
