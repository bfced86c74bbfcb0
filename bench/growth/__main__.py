"""How the cost of a step and of a first token grows, fitted to bytes and operations, and drawn.

    python -m bench.growth --shape 160m --dtype bf16 --minutes 30
    python -m bench.growth --series context batch

Series are decoding against batch, context, adapters, vocabulary and threads, and the first token
against the length of the prompt and of a prefix that the cache has. Rows go to
build/growth/SHAPE-DTYPE.json as they come: a run that ends at --minutes, or is interrupted, is gone
on with by the next one, and --again measures anew. Then the table is printed, and written beside
it with a page of plots.

Every point has a process' engine of its own vocabulary, threads and number of adapters, whose
resident memory is given. With --peer another engine (python -m bench.peers install llama.cpp)
takes turns with ours where its program can be asked for the point: one sequence without a shared
prefix or adapters. Wants a quiet machine.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.checkpoints import SHAPES, make_checkpoint
from bench.growth.point import NUM_NEW, SIZES, Point, points_of, shape_of
from bench.growth.report import Row, page, series_of, table
from bench.peers.driver import Load
from bench.peers.llama_cpp import LlamaCpp
from bench.peers.peer import Peer
from bench.peers.process import SideError
from bench.peers.work import Work
from lmi_core.bench.rooflines import ELEMENT_BYTES

RESULTS = Path("build/growth")
Measure = Callable[[Point, int], tuple[float, float]]


def read_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    rows = json.loads(path.read_text())
    for row in rows:
        row["point"] = Point(**row["point"])
        row["seconds"] = tuple(row["seconds"])
        row["peer_seconds"] = tuple(row.get("peer_seconds", ()))
    return [Row(**row) for row in rows]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


@contextlib.contextmanager
def our_engine(shape: str, dtype: str, points: list[Point]) -> Iterator[Measure]:
    """Asks the engine of the points, in a process of its own, for one's seconds in a round and for
    the process' resident MB."""
    request = {"shape": shape, "dtype": dtype, "points": [asdict(point) for point in points]}
    command = [sys.executable, "-m", "bench.growth.measure", json.dumps(request)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        source, answers = process.stdin, process.stdout
        assert source is not None
        assert answers is not None

        def answer() -> str:
            line = answers.readline()
            if not line:
                sys.exit(f"the engine of {points[0]} ended with {process.wait()}")
            return line

        def measure(point: Point, seed: int) -> tuple[float, float]:
            print(json.dumps([points.index(point), seed]), file=source, flush=True)
            seconds, resident_mb = json.loads(answer())
            return seconds, resident_mb

        try:
            answer()
            yield measure
        finally:
            process.terminate()


def run(arguments: argparse.Namespace, path: Path) -> list[Row]:
    rows = [] if arguments.again else read_rows(path)
    until = time.monotonic() + 60 * arguments.minutes
    wanted = [p for name in arguments.series for p in points_of(name, arguments.threads)]
    known = {row.point for row in rows}
    missing = sorted((p for p in wanted if p not in known), key=lambda p: p.engine)
    peer = LlamaCpp() if arguments.peer else None
    for _, group in itertools.groupby(missing, key=lambda p: p.engine):
        points = sorted(group, key=lambda p: p.num_tokens)
        shape = shape_of(arguments.shape, points[0].vocab_size)
        checkpoint = make_checkpoint(shape, Path("build/models") / shape.name)
        with our_engine(arguments.shape, arguments.dtype, points) as ours:
            for point in points:
                if time.monotonic() > until:
                    print(f"stopped after {arguments.minutes:g} minutes: the next run goes on")
                    return rows
                theirs = their_engine(peer, checkpoint, arguments.dtype, point) if peer else None
                row = measured(point, ours, theirs, arguments.rounds)
                rows.append(row)
                write_rows(path, rows)
                ratio = "" if row.ratio is None else f", {row.ratio:.2f}x {arguments.peer}"
                print(f"{point.series} {point.size}: {1e3 * row.median:.2f} ms{ratio}", flush=True)
    return rows


def measured(
    point: Point, ours: Measure, theirs: Callable[[int], float] | None, rounds: int
) -> Row:
    """By turns, where there is another engine that doesn't fail."""
    seconds: list[float] = []
    others: list[float] = []
    resident_mb = 0.0
    for seed in range(rounds):
        ours_s, resident_mb = ours(point, seed)
        seconds.append(ours_s)
        try:
            if theirs is not None:
                others.append(theirs(seed))
        except SideError as error:
            print(error)
            theirs = None
            others.clear()
    return Row(point, tuple(seconds), resident_mb, tuple(others))


def their_engine(
    peer: Peer, checkpoint: Path, dtype: str, point: Point
) -> Callable[[int], float] | None:
    """The peer's seconds at the point; None where its program can't be asked for such a one."""
    if point.batch > 1 or point.shared or point.num_adapters:
        return None
    model = peer.model(checkpoint, checkpoint.name, dtype)
    num_threads = point.num_threads or len(os.sched_getaffinity(0))
    side = peer.engine_side(Load(model, dtype, num_threads, 1))
    side.start()
    work = Work("", "decode", 1, point.context, NUM_NEW)
    if point.prompt:
        work = Work("", "prefill", 1, point.prompt, 1)
    num_tokens = point.prompt or 1
    return lambda seed: num_tokens / side.measure(work, seed).tokens_per_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="160m")
    parser.add_argument("--dtype", choices=sorted(ELEMENT_BYTES), default="bf16")
    parser.add_argument("--series", nargs="*", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--threads", type=int, default=0, help="0: as many as cores")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", choices=["llama.cpp"], help="measure it too, in turn with ours")
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
