"""What the measuring modules share: options, times on a device, rows of results."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FLUSHED_BYTES = 256 << 20
"""Written before each timed call on a GPU, beyond its caches."""


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
    except ImportError as error:
        row = {"what": what, "skipped": str(error)}
    except Exception as error:  # one figure less, the others are measured
        row = {"what": what, "error": f"{type(error).__name__}: {error}"[:500]}
    print(json.dumps(row), flush=True)
    return row


def write(path: Path | None, rows: object) -> None:
    if path is not None:
        path.write_text(json.dumps(rows, indent=2) + "\n")


def read_roofs(results: Path | None) -> dict[str, float]:
    """What ``bench.gpu.roofs`` wrote beside these results, or nothing."""
    path = results.with_name("roofs.json") if results is not None else Path("roofs.json")
    return dict(json.loads(path.read_text())) if path.exists() else {}
