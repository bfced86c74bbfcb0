#!/usr/bin/env python3
"""Registers, spills and static shared memory of every CUDA kernel, held to resources.txt.

``resources.py compile COMMAND`` runs a compiler command and keeps what ptxas says beside the
object; ``resources.py check BUILD_DIR`` fails where a kernel takes more than resources.txt allows
it, or is not in it; ``resources.py write BUILD_DIR`` makes a new one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

CEILINGS = Path(__file__).parents[2] / "csrc/cuda/resources.txt"
SUFFIX = ".ptxas"
HEADER = """\
# Ceilings of each kernel on sm_90a, checked by `make cuda`, written by `make cuda-resources`.
# registers per thread, bytes spilled per thread (stores + loads), bytes of static shared memory
"""
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
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
    found: dict[str, Resources] = {}
    for path in sorted(build_dir.rglob(f"*.cu.o{SUFFIX}")):
        name, spilled = "", 0
        for line in path.read_text().splitlines():
            if match := _ENTRY.search(line):
                name, spilled = match[1], 0
            elif match := _SPILL.search(line):
                spilled = int(match[1]) + int(match[2])
            elif match := _USED.search(line):
                shared = _SHARED.search(line)
                found[name] = Resources(int(match[1]), spilled, int(shared[1]) if shared else 0)
    return dict(zip(readable_names(found), found.values(), strict=True))


def readable_names(symbols: Iterable[str]) -> list[str]:
    """What kernels are called in resources.txt."""
    names = "\n".join(symbols)
    plain = subprocess.run(["c++filt"], input=names, capture_output=True, text=True, check=True)
    short = (re.sub(r"lmi::cuda::|\(anonymous namespace\)::|^void ", "", name)
             for name in plain.stdout.splitlines())  # fmt: skip
    return [re.sub(r"\([^)]*\)$", "", name).replace(" ", "") for name in short]


def read_ceilings() -> dict[str, Resources]:
    rows = (line.split() for line in CEILINGS.read_text().splitlines() if not line.startswith("#"))
    return {name: Resources(*map(int, numbers)) for name, *numbers in rows}


def check(build_dir: Path) -> int:
    found, ceilings = read_build(build_dir), read_ceilings()
    faults = [f"{name} is not built: remove it" for name in ceilings.keys() - found.keys()]
    for name, resources in found.items():
        if name not in ceilings:
            faults.append(f"{name} is new: add it")
            continue
        for field, value, ceiling in zip(Resources._fields, resources, ceilings[name], strict=True):
            if value > ceiling:
                faults.append(f"{name}: {field} {value}, the ceiling is {ceiling}")
    for fault in faults:
        print(f"{CEILINGS.name}: {fault}", file=sys.stderr)
    if faults:
        print("where that is meant: make cuda-resources", file=sys.stderr)
    else:
        spilling = sum(resources.spill_bytes > 0 for resources in found.values())
        print(f"{len(found)} kernels within {CEILINGS.name}, {spilling} of them spill")
    return 1 if faults or not found else 0


def write(build_dir: Path) -> int:
    found = read_build(build_dir)
    width = max(map(len, found))
    rows = (
        f"{name:<{width}} {r.registers:>4} {r.spill_bytes:>4} {r.shared_bytes:>6}\n"
        for name, r in sorted(found.items())
    )
    CEILINGS.write_text(HEADER + "".join(rows))
    return 0


def main() -> int:
    match sys.argv[1:]:
        case ["compile", *command]:
            return compile_object(command)
        case ["check", build_dir]:
            return check(Path(build_dir))
        case ["write", build_dir]:
            return write(Path(build_dir))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
