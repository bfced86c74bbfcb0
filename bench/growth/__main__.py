"""How the cost of a step and of a first token grows, fitted to bytes and operations, and drawn.

    python -m bench.growth --shape 160m --dtype bf16 --minutes 30
    python -m bench.growth --series context batch

Series are decoding against batch, context, adapters, vocabulary and threads, and the first token
against the length of the prompt and of a prefix that the cache has. Rows go to
build/growth/SHAPE-DTYPE.json as they come: a run that ends at --minutes, or is interrupted, is gone
on with by the next one, and --again measures anew. Then the table is printed, and written beside
it with a page of plots.

Every point has a process' engine of its own vocabulary, threads and number of adapters, whose
resident memory is given. Wants a quiet machine, and says nothing of other engines.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.checkpoints import SHAPES
from bench.growth.point import SIZES, Point, points_of
from bench.growth.report import Row, page, series_of, table
from lmi_core.bench.rooflines import ELEMENT_BYTES

RESULTS = Path("build/growth")


def read_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    return [
        Row(Point(**row["point"]), tuple(row["seconds"]), row["resident_mb"])
        for row in json.loads(path.read_text())
    ]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def measured(
    shape: str, dtype: str, rounds: int, points: list[Point], until: float
) -> Iterator[Row]:
    """Rows of the points of one engine as they come, until the monotonic time ``until``."""
    request = {"shape": shape, "dtype": dtype, "rounds": rounds}
    request["points"] = [asdict(point) for point in points]
    command = [sys.executable, "-m", "bench.growth.measure", json.dumps(request)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                row = json.loads(line)
                yield Row(Point(**row["point"]), tuple(row["seconds"]), row["resident_mb"])
                if time.monotonic() > until:
                    return
        finally:
            process.terminate()
    if process.returncode:
        sys.exit(f"the engine of {points[0]} ended with {process.returncode}")


def run(arguments: argparse.Namespace, path: Path) -> list[Row]:
    rows = [] if arguments.again else read_rows(path)
    until = time.monotonic() + 60 * arguments.minutes
    wanted = [p for name in arguments.series for p in points_of(name, arguments.threads)]
    known = {row.point for row in rows}
    missing = sorted((p for p in wanted if p not in known), key=lambda p: p.engine)
    for _, group in itertools.groupby(missing, key=lambda p: p.engine):
        if time.monotonic() > until:
            print(f"stopped after {arguments.minutes:g} minutes: the next run goes on")
            break
        points = sorted(group, key=lambda p: p.num_tokens)
        for row in measured(arguments.shape, arguments.dtype, arguments.rounds, points, until):
            rows.append(row)
            write_rows(path, rows)
            print(f"{row.point.series} {row.point.size}: {1e3 * row.median:.2f} ms", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="160m")
    parser.add_argument("--dtype", choices=sorted(ELEMENT_BYTES), default="bf16")
    parser.add_argument("--series", nargs="*", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--threads", type=int, default=0, help="0: as many as cores")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no point after these")
    parser.add_argument("--again", action="store_true", help="forget what was measured before")
    arguments = parser.parse_args()
    path = RESULTS / f"{arguments.shape}-{arguments.dtype}.json"
    series = series_of(run(arguments, path), arguments.shape, arguments.dtype)
    text = table(series)
    path.with_suffix(".md").write_text(text)
    title = f"{arguments.shape}, {arguments.dtype}: how cost grows"
    path.with_suffix(".html").write_text(page(title, series))
    print(f"\n{text}\n{path.with_suffix('.html')}")


if __name__ == "__main__":
    main()
