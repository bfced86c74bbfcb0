"""``lmi explain``: what becomes of every key, as a table or as JSON."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from lmi_core.config.artefacts.cache import readable_directory
from lmi_core.config.judge import judge, judge_server
from lmi_core.config.kept_weights import weight_lines
from lmi_core.config.memory_needs import Needs, memory_needs
from lmi_core.config.model_config import ModelConfig
from lmi_core.config.problem import Problems
from lmi_core.config.resolve import Report, examine
from lmi_core.config.rows import DEFAULT, Row, refused_rows
from lmi_core.config.table.capabilities import BACKENDS
from lmi_core.config.table.option import SYSTEMS, Outcome
from lmi_core.config.targets.host import Host, detect_host
from lmi_core.config.targets.server_config import ServerConfig
from lmi_core.text.printable import printable

if TYPE_CHECKING:
    from lmi_core.models.found_model import FoundModel

EXIT_USABLE = 0
EXIT_WARNINGS = 1
EXIT_REFUSED = 2

_COLOURS = {
    Outcome.HONOURED: "32",
    Outcome.MAPPED: "36",
    Outcome.NO_EFFECT: "33",
    Outcome.REFUSED: "31",
}
_LEAST_TEXT = 28
"""Columns that a row's text needs to be beside the others."""
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
    host = detect_host(environ) if host is None else host
    report = examine(argv, environ, host, default_model=default_model)
    found: list[FoundModel | None] = [None] * len(report.models)
    if not report.errors:
        report, found = _judged(report, environ)
    report = replace(report, rows=tuple(refused_rows(rows, report.errors) for rows in report.rows))
    needs = [
        _needs(model, of_it, report.server, environ)
        for model, of_it in zip(report.models, found, strict=True)
    ]
    if "--json" in argv:
        json.dump(as_json(report, needs), out, indent=2)
        out.write("\n")
        return exit_code(report, strict="--strict" in argv)
    is_terminal = out.isatty()
    page = Page(
        colour=is_terminal and "NO_COLOR" not in environ,
        width=shutil.get_terminal_size().columns if is_terminal else None,
        shows_defaults="--all" in argv,
    )
    out.write(page.of(report, needs, found))
    return exit_code(report, strict="--strict" in argv)


def _judged(report: Report, environ: Mapping[str, str]) -> tuple[Report, list[FoundModel | None]]:
    """With what speaks against serving its models, and what was read of their files."""
    problems = Problems([*report.warnings, *judge_server(report.server)])
    found = []
    for model in report.models:
        verdict = judge(model, report.server, environ)
        problems.items += verdict.problems
        found.append(verdict.found)
    return replace(report, errors=problems.errors, warnings=problems.warnings), found


def _needs(
    model: ModelConfig, found: FoundModel | None, server: ServerConfig, environ: Mapping[str, str]
) -> Needs:
    directory = readable_directory(model.source, server, environ)
    draft = None
    if model.draft is not None:
        draft = readable_directory(model.draft.source, server, environ)
    return memory_needs(model, directory, draft, found)


def exit_code(report: Report, *, strict: bool) -> int:
    """Return 0 for usable, 1 for usable with warnings when strict, 2 for refused."""
    if report.errors:
        return EXIT_REFUSED
    return EXIT_WARNINGS if strict and report.warnings else EXIT_USABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A report for people; ``width`` is that of the terminal, None for as wide as it comes."""

    colour: bool = False
    width: int | None = None
    shows_defaults: bool = True

    def of(
        self,
        report: Report,
        needs: Sequence[Needs] = (),
        found: Sequence[FoundModel | None] = (),
    ) -> str:
        """The text; ``needs`` of memory and what was ``found`` by model, empty: not known."""
        lines: list[str] = []
        num_hidden = 0
        for i, (model, rows) in enumerate(zip(report.models, report.rows, strict=True)):
            shown = [row for row in rows if self.shows_defaults or row.where != DEFAULT]
            num_hidden += len(rows) - len(shown)
            own = needs[i] if needs else None, found[i] if found else None
            for line in _heading(model, *own):
                lines += self._wrapped(line, " " * 11)
            lines += [*self._table(shown), ""]
        if report.server_rows:
            lines += ["server", *self._table(report.server_rows), ""]
        for title, problems in (("refused", report.errors), ("warnings", report.warnings)):
            if problems:
                lines.append(title)
                for problem in problems:
                    lines += self._wrapped(f"  {printable(str(problem))}", "    ")
                lines.append("")
        hidden = f"; --all also shows {num_hidden} defaults" if num_hidden else ""
        lines.append(("refused" if report.errors else "usable") + hidden)
        return "\n".join(lines) + "\n"

    def _table(self, rows: Sequence[Row]) -> list[str]:
        cells = [
            tuple(map(printable, (row.key, row.value, row.where, row.outcome, row.text)))
            for row in rows
        ]
        widths = [max((len(cell[i]) for cell in cells), default=0) for i in range(4)]
        widths = [min(width, most) for width, most in zip(widths, (44, 44, 60, 9), strict=True)]
        indent = 2 + sum(width + 2 for width in widths)
        is_narrow = self.width is not None and self.width - indent < _LEAST_TEXT
        lines = []
        for cell, row in zip(cells, rows, strict=True):
            if is_narrow:
                lines += self._stacked(cell, row.outcome)
            else:
                lines += self._beside(cell, widths, indent, row.outcome)
            lines += [f"      overrides {printable(place)}" for place in row.overridden]
        return lines

    def _beside(
        self, cell: Sequence[str], widths: Sequence[int], indent: int, outcome: Outcome
    ) -> list[str]:
        """A row in columns, the last of which is wrapped."""
        padded = [text.ljust(width) for text, width in zip(cell, widths, strict=False)]
        before = len("  " + "  ".join(padded[:3])) + 2
        first, *rest = self._wrapped("  " + "  ".join((*padded, cell[4])), " " * indent)
        # Coloured when it is wrapped: colours have no width.
        end = before + len(cell[3])
        return [first[:before] + self._coloured(first[before:end], outcome) + first[end:], *rest]

    def _stacked(self, cell: Sequence[str], outcome: Outcome) -> list[str]:
        """A row in lines of its own, where columns don't fit."""
        key, value, where, word, text = cell
        head = self._wrapped(f"  {key}={value}  ({where})", "      ")
        body = self._wrapped(f"      {word}: {text}", "      ")
        body[0] = body[0].replace(word, self._coloured(word, outcome), 1)
        return [*head, *body]

    def _coloured(self, word: str, outcome: Outcome) -> str:
        return f"\033[{_COLOURS[outcome]}m{word}\033[0m" if self.colour else word

    def _wrapped(self, line: str, indent: str) -> list[str]:
        if self.width is None or len(line) <= self.width:
            return [line.rstrip()]
        return textwrap.wrap(line, self.width, subsequent_indent=indent, break_on_hyphens=False)


def _heading(model: ModelConfig, needs: Needs, found: FoundModel | None) -> list[str]:
    source = model.source.location or "(no files)"
    if model.source.revision:
        source += f" at {model.source.revision}"
    title = model.name if model.version is None else f"{model.name} version {model.version}"
    lines = [
        f"model {title}",
        f"  files    {source} ({model.source.kind})",
        f"  written  for {_WRITTEN.get(model.system, SYSTEMS[model.system])}",
        f"  backend  {BACKENDS[model.backend].title}: {model.reason}",
    ]
    if model.draft is not None:
        lines.append(f"  drafts   by {model.draft.source.location} ({model.draft.source.kind})")
    if model.backend != "handler":
        lines.append(f"  devices  {model.placement.describe()}")
    lines += [f"  weights  {words}" for words in weight_lines(model, found)]
    if needs is not None:
        lines.append(f"  memory   {needs if isinstance(needs, str) else needs.describe()}")
    return [printable(line) for line in lines]


def as_json(report: Report, needs: Sequence[Needs] = ()) -> dict[str, object]:
    """Return a report as data, with the ``needs`` of memory by model."""
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
                "placement": asdict(model.placement),
                "engine": {} if model.engine is None else model.engine.shown(),
                "memory": _memory_json(needs[i]) if needs else None,
                "rows": [_row_json(row) for row in rows],
            }
            for i, (model, rows) in enumerate(zip(report.models, report.rows, strict=True))
        ],
        "server": [_row_json(row) for row in report.server_rows],
        "errors": [_problem_json(problem) for problem in report.errors],
        "warnings": [_problem_json(problem) for problem in report.warnings],
    }


def _memory_json(needs: Needs) -> dict[str, object] | None:
    if needs is None:
        return None
    return {"problem": needs} if isinstance(needs, str) else asdict(needs)


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
