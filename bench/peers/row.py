"""A row of the comparison: its pairs, its file, and what they come to."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.family_shapes import ALL_SHAPES, shape_of
from bench.peers.work import WORKS, Figure
from lmi_core.bench.rooflines import ELEMENT_BYTES, GGUF_BYTES, decode_roof_s, prefill_roof_s
from lmi_core.bench.roofs import Roofs

NUM_PAIRS = 7


@dataclass(frozen=True, slots=True)
class Pair:
    """Both sides within one minute, and the machine's roofs between them."""

    at: str
    """UTC, ISO 8601."""
    ours: Figure
    theirs: Figure
    roofs: Roofs


@dataclass(frozen=True, slots=True)
class Quartiles:
    low: float
    median: float
    high: float


@dataclass(slots=True)
class Row:
    peer: str
    peer_version: str
    peer_format: str
    shape: str
    dtype: str
    what: str
    commit: str
    machine: dict[str, Any]
    ours_about: dict[str, Any] = field(default_factory=dict)
    theirs_about: dict[str, Any] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    error: str = ""
    """Why the row ended early, of the last attempt."""

    @property
    def name(self) -> str:
        return f"{self.shape}-{self.dtype}-{self.what}-{self.peer}"

    @property
    def is_done(self) -> bool:
        return len(self.pairs) >= NUM_PAIRS

    @property
    def ratio(self) -> Quartiles:
        """Ours over theirs, in tokens per second."""
        return quartiles(pair.ours.tokens_per_s / pair.theirs.tokens_per_s for pair in self.pairs)

    @property
    def first_token_ratio(self) -> float | None:
        """Ours over theirs, less is better."""
        return _median_ratio(
            (pair.ours.first_token_ms, pair.theirs.first_token_ms) for pair in self.pairs
        )

    @property
    def per_token_ratio(self) -> float | None:
        """Ours over theirs, less is better."""
        return _median_ratio(
            (pair.ours.per_token_ms, pair.theirs.per_token_ms) for pair in self.pairs
        )

    def shares(self, side: str) -> Quartiles | None:
        """The side's ("ours" or "theirs") share of the roof; None for a dtype without one."""
        if self.dtype not in ELEMENT_BYTES | GGUF_BYTES:
            return None
        return quartiles(
            getattr(pair, side).tokens_per_s / self.roof_tokens_per_s(pair.roofs)
            for pair in self.pairs
        )

    def roof_tokens_per_s(self, roofs: Roofs) -> float:
        """What the machine would allow. Serving is the prefills and then the steps of all requests
        at once, without sampling, HTTP or Python."""
        shape, work = shape_of(self.shape), WORKS[self.what]
        # Of the tokens that aren't cached; their attention to those that are is left out.
        num_prefilled = work.num_prompt - work.num_shared
        prefill_s = prefill_roof_s(shape, self.dtype, num_prefilled, roofs)
        if work.kind == "prefill":
            return work.num_prompt / prefill_s
        context = work.num_prompt + work.num_new / 2
        step_s = decode_roof_s(shape, self.dtype, work.num_requests, context, roofs)
        if work.kind == "decode":
            return work.num_requests / step_s
        total_s = work.num_requests * prefill_s + (work.num_new - 1) * step_s
        return work.num_requests * work.num_new / total_s

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.name}.json"
        partial = path.with_suffix(".partial")
        summary = {"ratio": asdict(self.ratio)} if self.pairs else {}
        partial.write_text(json.dumps(asdict(self) | {"summary": summary}, indent=1) + "\n")
        partial.rename(path)


def load_row(path: Path) -> Row:
    values = json.loads(path.read_text())
    values.pop("summary")
    pairs = [
        Pair(pair["at"], Figure(**pair["ours"]), Figure(**pair["theirs"]), Roofs(**pair["roofs"]))
        for pair in values.pop("pairs")
    ]
    return Row(**values, pairs=pairs)


def load_rows(directory: Path) -> list[Row]:
    """Every row that has a pair, by shape, dtype, work and peer."""
    rows = [load_row(path) for path in sorted(directory.glob("*.json"))]
    works = list(WORKS)
    shapes = ALL_SHAPES
    return sorted(
        (row for row in rows if row.pairs),
        key=lambda row: (shapes.index(row.shape), row.dtype, works.index(row.what), row.peer),
    )


def resume(row: Row, directory: Path) -> Row:
    """The row as it is on file, where that was of the same code, peer and machine; else ``row``."""
    path = directory / f"{row.name}.json"
    if not path.exists():
        return row
    before = load_row(path)
    same = ("peer_version", "peer_format", "commit", "machine")
    if any(getattr(before, name) != getattr(row, name) for name in same):
        return row
    before.error = ""
    return before


def quartiles(values: Iterable[float]) -> Quartiles:
    ordered = sorted(values)
    if len(ordered) == 1:
        ordered *= 2
    return Quartiles(*statistics.quantiles(ordered, n=4, method="inclusive"))


def _median_ratio(pairs: Iterable[tuple[float | None, float | None]]) -> float | None:
    ratios = [ours / theirs for ours, theirs in pairs if ours is not None and theirs]
    return statistics.median(ratios) if ratios else None


def describe_machine(num_threads: int) -> dict[str, Any]:
    from lmi_core import _native

    info = _native.cpu_info()
    return {
        "cpu": info["model"],
        "num_threads": num_threads,
        "instruction_set": _native.default_instruction_set(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def describe_commit() -> str:
    """The commit, and "-dirty" where files differ from it, results aside."""
    outside = ("--", ".", ":(exclude)bench/results")
    commit = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", *outside)
    return commit + ("-dirty" if changed else "")


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()
