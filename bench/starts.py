"""The command line of the benchmarks that start a server several times."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any


def starts_parser(doc: str | None, what: str | None = None) -> argparse.ArgumentParser:
    """A parser with the options that they share. ``what``: which starts ``--starts`` counts."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--starts", type=int, default=5, help=what)
    parser.add_argument("--json", action="store_true")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    if args.starts < 1:
        parser.error("--starts must be at least 1")
    return args


def report(figures: Any, columns: str, row: str, *, as_json: bool) -> None:
    """Print a dataclass as an object, or its row under ``columns``, the table's header."""
    if as_json:
        print(json.dumps(asdict(figures)))
        return
    print(columns)
    print("|" + "---|" * (columns.count("|") - 1))
    print(row)
