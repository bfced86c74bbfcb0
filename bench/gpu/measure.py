"""What the measuring modules share: options, times on a device, rows of results."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.gpu import lost_device

FLUSHED_BYTES = 1 << 30
"""Written before each timed call on a GPU: beyond its caches, and long enough for the host to have
the call on the stream before the device gets there."""
ITEM_LIMIT_S = 40


class Item(NamedTuple):
    """A row of results to be: ``measure`` gives what it has beside its name."""

    what: str
    measure: Callable[[], dict[str, Any]]


def parse(description: str | None, **more: dict[str, Any]) -> argparse.Namespace:
    """The options of every module, and ``more`` of its own."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    for name, settings in more.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **settings)
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    return arguments


def median_s(run: Callable[[], object], device: str, num_repeats: int = 20) -> float:
    """Median seconds of a call, with cold caches, after three calls that aren't timed."""
    for _ in range(3):
        run()
    if device == "cpu":
        return statistics.median(_host_s(run) for _ in range(3))
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)
    times = []
    for _ in range(num_repeats):
        flushed.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) * 1e-3 for begin, end in times)


def _host_s(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def attempt(what: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A row of results, or why there is none; printed."""
    try:
        row = {"what": what, **run()}
    except (Exception, SystemExit) as error:  # one figure less, the others are measured
        row = _without_figures(what, error)
    print(json.dumps(row), flush=True)
    return row


async def row_of(what: str, work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """``attempt`` of what is awaited."""
    try:
        row = {"what": what, **await work}
    except Exception as error:
        row = _without_figures(what, error)
    print(json.dumps(row), flush=True)
    return row


def _without_figures(what: str, error: BaseException) -> dict[str, Any]:
    if isinstance(error, ImportError):
        return {"what": what, "skipped": str(error)}
    return {"what": what, "error": f"{type(error).__name__}: {error}"[:500]}


def attempt_each(module: str, items: Sequence[Item], arguments: argparse.Namespace) -> None:
    """Measure the items in a process that ends where the device is lost or hangs; another one goes
    on behind. ``arguments`` have ``is_child`` of the module's own option --is-child."""
    path: Path | None = arguments.json
    if path is None or arguments.is_child:
        _attempt_the_rest(items, path)
        return
    write(path, [])
    while (num_done := len(_read(path))) < len(items):
        child = subprocess.run([sys.executable, "-m", module, *sys.argv[1:], "--is-child"])
        rows = _read(path)
        is_lost = child.returncode == lost_device.EXIT_CODE
        if len(rows) == num_done or (len(rows) < len(items) and not is_lost):
            error = f"its process ended with exit code {child.returncode}"
            write(path, [*rows, {"what": items[len(rows)].what, "error": error}])


def _attempt_the_rest(items: Sequence[Item], path: Path | None) -> None:
    rows = [] if path is None else _read(path)
    for item in items[len(rows) :]:
        faulthandler.dump_traceback_later(ITEM_LIMIT_S, exit=True)
        rows.append(attempt(item.what, item.measure))
        write(path, rows)
        if lost_device.is_lost():
            sys.stdout.flush()
            os._exit(lost_device.EXIT_CODE)
    faulthandler.cancel_dump_traceback_later()


def _read(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows


def write(path: Path | None, rows: object) -> None:
    if path is not None:
        path.write_text(json.dumps(rows, indent=2) + "\n")


def read_roofs(results: Path | None) -> dict[str, float]:
    """What ``bench.gpu.roofs`` wrote beside these results, or nothing."""
    path = results.with_name("roofs.json") if results is not None else Path("roofs.json")
    return dict(json.loads(path.read_text())) if path.exists() else {}
