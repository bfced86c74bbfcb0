"""What a server costs before its first request: start, memory, idle processor time, disk.

    python -m bench.startup                       the default model, the median of 5 starts
    python -m bench.startup DIR --venv .venv      another model; also the environment's size

Prints one row of a table and, with ``--json``, an object. Wants a quiet machine: the time is taken
from the creation of the process to the first 200 of ``GET /ping``.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench.server_process import cpu_ns, started
from bench.starts import parse, report, starts_parser

SERVE = (sys.executable, "-m", "lmi_core", "serve")
_COLUMNS = "| model | seconds to first /ping | resident MB | idle CPU % | environment MB |"


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """Figures of one model; memory is that of the last start after its idle time."""

    model: str
    num_starts: int
    median_s: float
    """From the creation of the process to the first /ping that is answered with 200."""
    worst_s: float
    resident_mb: float
    peak_resident_mb: float
    idle_seconds: float
    idle_cpu_percent: float
    """Of one core."""
    venv_mb: float | None


def measure(arguments: list[str], num_starts: int, idle_s: float, venv: Path | None) -> Startup:
    """Start the server several times; the last one is watched while it idles."""
    seconds = []
    for _ in range(num_starts - 1):
        with started([*SERVE, *arguments]) as server:
            seconds.append(server.start_s)
    with started([*SERVE, *arguments]) as server:
        seconds.append(server.start_s)
        # What a start leaves to do, such as closing the connection that asked.
        time.sleep(1.0)
        idle_percent = idle_cpu_percent(server.pid, idle_s)
        resident, peak = memory_mb(server.pid)
    return Startup(
        model=arguments[0] if arguments else "default",
        num_starts=num_starts,
        median_s=round(statistics.median(seconds), 3),
        worst_s=round(max(seconds), 3),
        resident_mb=round(resident, 1),
        peak_resident_mb=round(peak, 1),
        idle_seconds=idle_s,
        idle_cpu_percent=round(idle_percent, 3),
        venv_mb=None if venv is None else round(disk_mb(venv), 1),
    )


def idle_cpu_percent(pid: int, seconds: float) -> float:
    """Share of one core, user and system, that the process used; by all threads' nanoseconds."""
    begin, begin_ns = time.perf_counter(), cpu_ns(pid)
    time.sleep(seconds)
    used_ns = cpu_ns(pid) - begin_ns
    return 100.0 * used_ns * 1e-9 / (time.perf_counter() - begin)


def memory_mb(pid: int) -> tuple[float, float]:
    """Resident memory now and at its peak, in 10^6 bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    resident, peak = (int(values[name].split()[0]) * 1024e-6 for name in ("VmRSS", "VmHWM"))
    return resident, peak


def disk_mb(directory: Path) -> float:
    """What the files under a directory take on disk, in 10^6 bytes; links are not followed."""
    paths = (Path(root) / name for root, _, names in os.walk(directory) for name in names)
    return sum(path.lstat().st_blocks for path in paths) * 512e-6


def row(figures: Startup) -> str:
    """One row under ``_COLUMNS``."""
    venv = "-" if figures.venv_mb is None else f"{figures.venv_mb:.0f}"
    return (
        f"| {figures.model} | {figures.median_s:.2f} (worst {figures.worst_s:.2f} "
        f"of {figures.num_starts}) | {figures.resident_mb:.0f} (peak "
        f"{figures.peak_resident_mb:.0f}) | {figures.idle_cpu_percent:.3f} over "
        f"{figures.idle_seconds:g} s | {venv} |"
    )


def main() -> None:
    parser = starts_parser(__doc__)
    parser.add_argument("model", nargs="?", help="model directory (the server's default)")
    parser.add_argument("--idle-seconds", type=float, default=30.0)
    parser.add_argument("--venv", type=Path, help="environment whose size is measured")
    args = parse(parser)
    figures = measure([args.model] if args.model else [], args.starts, args.idle_seconds, args.venv)
    report(figures, _COLUMNS, row(figures), as_json=args.json)


if __name__ == "__main__":
    main()
