"""``lmi explain``: what becomes of every key, as a table or as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from lmi_core.config.model_config import ModelConfig
from lmi_core.config.resolve import Report, examine
from lmi_core.config.rows import Row
from lmi_core.config.table.capabilities import BACKENDS
from lmi_core.config.table.option import SYSTEMS, Outcome
from lmi_core.config.targets.host import Host
from lmi_core.text.printable import printable

EXIT_USABLE = 0
EXIT_WARNINGS = 1
EXIT_REFUSED = 2

_COLOURS = {
    Outcome.HONOURED: "32",
    Outcome.MAPPED: "36",
    Outcome.NO_EFFECT: "33",
    Outcome.REFUSED: "31",
}
_WRITTEN = {"common": "LMI, naming no system"}


def main(
    argv: Sequence[str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    host: Host | None = None,
    out: TextIO | None = None,
    default_model: Path | None = None,
) -> int:
    """Run ``lmi explain`` and return its exit code; ``default_model`` is for no model named."""
    argv = sys.argv[1:] if argv is None else list(argv)
    out = sys.stdout if out is None else out
    environ = os.environ if environ is None else environ
    if "-h" in argv or "--help" in argv:
        from lmi_core.config.reference import command_help

        out.write(command_help("explain"))
        return EXIT_USABLE
    report = examine(argv, environ, host, default_model=default_model)
    if "--json" in argv:
        json.dump(as_json(report), out, indent=2)
        out.write("\n")
    else:
        colour = out.isatty() and "NO_COLOR" not in environ
        out.write(as_table(report, colour=colour))
    return exit_code(report, strict="--strict" in argv)


def exit_code(report: Report, *, strict: bool) -> int:
    """Return 0 for usable, 1 for usable with warnings when strict, 2 for refused."""
    if report.errors:
        return EXIT_REFUSED
    return EXIT_WARNINGS if strict and report.warnings else EXIT_USABLE


def as_table(report: Report, *, colour: bool = False) -> str:
    """Write a report for people."""
    lines: list[str] = []
    for model, rows in zip(report.models, report.rows, strict=True):
        lines += _heading(model)
        lines += _table(rows, colour)
        lines.append("")
    if report.server_rows:
        lines += ["server", *_table(report.server_rows, colour), ""]
    for title, problems in (("refused", report.errors), ("warnings", report.warnings)):
        if problems:
            lines += [title, *(f"  {printable(str(problem))}" for problem in problems), ""]
    lines.append("refused" if report.errors else "usable")
    return "\n".join(lines) + "\n"


def _heading(model: ModelConfig) -> list[str]:
    source = model.source.location or "(no files)"
    if model.source.revision:
        source += f" at {model.source.revision}"
    title = model.name if model.version is None else f"{model.name} version {model.version}"
    place = model.placement
    lines = [
        f"model {title}",
        f"  files    {source} ({model.source.kind})",
        f"  written  for {_WRITTEN.get(model.system, SYSTEMS[model.system])}",
        f"  backend  {BACKENDS[model.backend].title}: {model.reason}",
    ]
    if place.num_copies != 1 or place.tensor_parallel_degree != 1:
        lines.append(
            f"  devices  {place.tensor_parallel_degree} per copy, {place.num_copies} copies"
        )
    return [printable(line) for line in lines]


def _table(rows: Iterable[Row], colour: bool) -> list[str]:
    cells = [
        tuple(map(printable, (row.key, row.value, row.where, row.outcome, row.text)))
        for row in rows
    ]
    widths = [max((len(cell[i]) for cell in cells), default=0) for i in range(4)]
    widths = [min(width, limit) for width, limit in zip(widths, (44, 44, 60, 9), strict=True)]
    lines = []
    for cell, row in zip(cells, rows, strict=True):
        padded = [text.ljust(width) for text, width in zip(cell, widths, strict=False)]
        if colour:
            padded[3] = f"\033[{_COLOURS[row.outcome]}m{padded[3]}\033[0m"
        lines.append("  " + "  ".join((*padded, cell[4])).rstrip())
        lines += [f"      overrides {printable(place)}" for place in row.overridden]
    return lines


def as_json(report: Report) -> dict[str, object]:
    """Return a report as data."""
    return {
        "usable": not report.errors,
        "models": [
            {
                "name": model.name,
                "version": model.version,
                "source": {
                    "kind": model.source.kind,
                    "location": model.source.location,
                    "revision": model.source.revision,
                },
                "written_for": model.system,
                "backend": model.backend,
                "reason": model.reason,
                "tensor_parallel_degree": model.placement.tensor_parallel_degree,
                "num_copies": model.placement.num_copies,
                "engine": dict(model.settings),
                "rows": [_row_json(row) for row in rows],
            }
            for model, rows in zip(report.models, report.rows, strict=True)
        ],
        "server": [_row_json(row) for row in report.server_rows],
        "errors": [_problem_json(problem) for problem in report.errors],
        "warnings": [_problem_json(problem) for problem in report.warnings],
    }


def _row_json(row: Row) -> dict[str, object]:
    return {
        "key": row.key,
        "value": row.value,
        "from": row.where,
        "outcome": str(row.outcome),
        "text": row.text,
        "overrides": list(row.overridden),
    }


def _problem_json(problem: object) -> dict[str, object]:
    names = ("where", "key", "message")
    return {name: getattr(problem, name) for name in names}


if __name__ == "__main__":
    sys.exit(main())
