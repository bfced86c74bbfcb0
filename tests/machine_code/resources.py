#!/usr/bin/env python3
"""What every CUDA kernel takes and keeps under way (latency.py), held to resources.txt.

``resources.py compile COMMAND`` runs a compiler command and keeps what ptxas says beside the
object; ``resources.py check BUILD_DIR`` fails where a kernel takes more than resources.txt allows
it, is not in it, or touches memory before it waits (waits.py); ``resources.py write BUILD_DIR``
makes a new one; ``resources.py report BUILD_DIR [PATTERN]`` prints the kernels with that in their
names, and fails where any is worse than the bars of latency.py; ``resources.py spills BUILD_DIR``
fails where a kernel spills much more on any of the architectures that were built than resources.txt
allows on sm_90a. All but the first and the last need cuobjdump, as loops.py does.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import waits
from latency import Latency, faults_of, read_latencies
from loops import readable_names

LIMITS = Path(__file__).parents[2] / "csrc/cuda/resources.txt"
SUFFIX = ".ptxas"
HEADER = """\
# Limits of each kernel on sm_90a, checked by `make cuda`, written by `make cuda-resources`.
# At most: registers per thread, bytes spilled per thread (stores + loads), static shared bytes.
# At least: blocks of a multiprocessor, KiB that it keeps under way. At most: atomics that loop,
# bytes read from the L2 cache over those of the operands (0: no product).
"""
OTHER_SPILL_BYTES = 128
"""That a kernel may spill beyond its limit on other architectures: it is fitted to sm_90a. On
sm_80, which has no fp8, few rows of it by scales of blocks spill 120."""
LEAST = ("blocks", "KiB under way")
FIELDS = ("registers", "spilled bytes", "shared bytes", *LEAST, "looping atomics", "L2 reads")
WIDTHS = (4, 4, 6, 3, 5, 3, 5)
_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


class Resources(NamedTuple):
    registers: int
    spill_bytes: int
    shared_bytes: int


def compile_object(command: list[str]) -> int:
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    lines = result.stderr.splitlines(keepends=True)
    said = [line for line in lines if "ptxas info" in line or "bytes stack frame" in line]
    sys.stderr.write("".join(line for line in lines if line not in said))
    if result.returncode == 0 and "-o" in command:
        target = Path(command[command.index("-o") + 1])
        target.with_name(target.name + SUFFIX).write_text("".join(said))
    return result.returncode


def read_build(build_dir: Path) -> dict[str, Resources]:
    """Of the kernels of a build for one architecture."""
    (found,) = read_builds(build_dir).values()
    return found


def read_builds(build_dir: Path) -> dict[str, dict[str, Resources]]:
    """By architecture."""
    found: dict[str, dict[str, Resources]] = {}
    for path in sorted(build_dir.rglob(f"*.cu.o{SUFFIX}")):
        name, architecture, spilled = "", "", 0
        for line in path.read_text().splitlines():
            if match := _ENTRY.search(line):
                name, architecture, spilled = match[1], match[2], 0
            elif match := _SPILL.search(line):
                spilled = int(match[1]) + int(match[2])
            elif match := _USED.search(line):
                shared = _SHARED.search(line)
                own = Resources(int(match[1]), spilled, int(shared[1]) if shared else 0)
                found.setdefault(architecture, {})[name] = own
    return {
        architecture: dict(zip(readable_names(own), own.values(), strict=True))
        for architecture, own in found.items()
    }


def rows_of(build_dir: Path) -> dict[str, list[float]]:
    """The columns of resources.txt, of every kernel that was built."""
    resources = read_build(build_dir)
    latencies = read_latencies(build_dir, resources)
    return {name: [*own, *columns_of(latencies[name])] for name, own in resources.items()}


def columns_of(one: Latency) -> list[float]:
    return [one.blocks, one.in_flight >> 10, one.looping_atomics, one.l2_reads]


def read_limits() -> dict[str, list[float]]:
    rows = (line.split() for line in LIMITS.read_text().splitlines() if not line.startswith("#"))
    return {name: list(map(float, numbers)) for name, *numbers in rows}


def check(build_dir: Path) -> int:
    found, limits = rows_of(build_dir), read_limits()
    faults = [f"{name} is not built: remove it" for name in limits.keys() - found.keys()]
    for name, row in found.items():
        if name not in limits:
            faults.append(f"{name} is new: add it")
            continue
        for field, value, limit in zip(FIELDS, row, limits[name], strict=True):
            if value < limit if field in LEAST else value > limit:
                faults.append(f"{name}: {field} {value:g}, the limit is {limit:g}")
    for fault in faults:
        print(f"{LIMITS.name}: {fault}", file=sys.stderr)
    if faults:
        print("where that is meant: make cuda-resources", file=sys.stderr)
    else:
        spilling = sum(row[1] > 0 for row in found.values())
        print(f"{len(found)} kernels within {LIMITS.name}, {spilling} of them spill")
    return 1 if faults or not found else 0


def check_spills(build_dir: Path) -> int:
    builds, limits = read_builds(build_dir), read_limits()
    faults = [
        f"{name} spills {own.spill_bytes} bytes on {architecture}"
        for architecture, found in builds.items()
        for name, own in found.items()
        if own.spill_bytes
        > limits.get(name, [0.0, 0.0])[FIELDS.index("spilled bytes")] + OTHER_SPILL_BYTES
    ]
    for fault in faults:
        print(fault, file=sys.stderr)
    for architecture, found in builds.items():
        most = max(own.registers for own in found.values())
        print(f"{architecture}: {len(found)} kernels of up to {most} registers")
    return 1 if faults or not builds else 0


def write(build_dir: Path) -> int:
    found = rows_of(build_dir)
    width = max(map(len, found))
    rows = (
        f"{name:<{width}} "
        + " ".join(f"{value:>{w}g}" for value, w in zip(row, WIDTHS, strict=True))
        for name, row in sorted(found.items())
    )
    LIMITS.write_text(HEADER + "\n".join(rows) + "\n")
    return 0


def report(build_dir: Path, pattern: str) -> int:
    resources = read_build(build_dir)
    latencies = read_latencies(build_dir, resources)
    num_faulty = 0
    for name, own in sorted(resources.items()):
        faults = faults_of(name, latencies[name])
        num_faulty += bool(faults)
        if pattern in name:
            row = zip(FIELDS, (*own, *columns_of(latencies[name])), strict=True)
            figures = [f"{field} {value:g}" for field, value in row]
            figures.append(f"spilling {latencies[name].spilling:.2%} of a loop")
            if predicted := latencies[name].prediction:
                share = f"{predicted.share:.0%} of the memory's rate predicted"
                figures.append(f"{share}, bound by {predicted.bound}")
            print(f"{name}: " + ", ".join(figures))
            print("".join(f"  FAULT: {fault}\n" for fault in faults), end="")
    print(f"{len(resources) - num_faulty} of {len(resources)} kernels are within the bars")
    return int(num_faulty > 0 or not resources)


def main() -> int:
    match sys.argv[1:]:
        case ["compile", *command]:
            return compile_object(command)
        case ["check", build_dir]:
            return check(Path(build_dir)) | waits.check(Path(build_dir))
        case ["spills", build_dir]:
            return check_spills(Path(build_dir))
        case ["write", build_dir]:
            return write(Path(build_dir))
        case ["report", build_dir, *pattern]:
            return report(Path(build_dir), "".join(pattern))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
