#!/usr/bin/env python3
"""Whether CUDA kernels wait for earlier ones before they touch memory, by their machine code.

``waits.py BUILD_DIR`` fails where one doesn't, as resources.py's ``check`` does. The emulator sees
that the sources do; this, that the compiler moved nothing before the wait. Bringing memory into the
cache is no access. For sm_90 and newer; needs cuobjdump, as loops.py does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from loops import Instruction, read_kernels

ACCESSES = ("LD", "LDG", "LDGSTS", "ST", "STG", "ATOM", "ATOMG", "RED", "REDG", "UBLKCP", "UBLKRED")
WAIT, TRIGGER = "ACQBULK", "PREEXIT"
"""griddepcontrol.wait and .launch_dependents."""


def fault_of(kernel: Sequence[Instruction]) -> str:
    """What is wrong with the kernel; "": nothing. Instructions count in order of their addresses:
    the compiler puts nothing behind the wait that comes before it."""
    kinds = [line.kind for line in kernel]
    if kinds.count(WAIT) != 1 or kinds.count(TRIGGER) != 1:
        return f"has {kinds.count(WAIT)} waits and {kinds.count(TRIGGER)} triggers, not one of each"
    before = kernel[: kinds.index(WAIT)]
    if any(line.kind == TRIGGER for line in before):
        return "lets the next kernel start before it waits"
    if any(line.kind == "EXIT" for line in before):
        return "can end before it waits"
    early = [line.text for line in before if line.kind in ACCESSES]
    return f"touches memory before it waits: {early[0]}" if early else ""


def check(build_dir: Path) -> int:
    num_kernels, num_faults = 0, 0
    for path in sorted(build_dir.rglob("*.cu.o")):
        for name, kernel in sorted(read_kernels(path).items()):
            num_kernels += 1
            if fault := fault_of(kernel):
                num_faults += 1
                print(f"{name} {fault}", file=sys.stderr)
    print(f"{num_kernels - num_faults} of {num_kernels} kernels wait before they touch memory")
    return int(num_faults > 0 or num_kernels == 0)


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    return check(Path(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
