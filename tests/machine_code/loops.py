#!/usr/bin/env python3
"""What the loops of CUDA kernels issue, read from their machine code; no GPU is needed.

``loops.py BUILD_DIR [PATTERN]`` disassembles the kernels whose names contain PATTERN and prints,
for each loop with tensor-core products: instructions of a turn, the cycles that their fixed stalls
take a lone warp, products, and how many instructions of each kind. A scheduler issues one
instruction a cycle, and a streaming multiprocessor has four: that bounds how fast a kernel can be,
whatever its memory does. Needs cuobjdump, of the CUDA toolkit or of Triton's wheel.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

PRODUCTS = ("HMMA", "IMMA", "QMMA", "HGMMA", "IGMMA", "QGMMA")
_FUNCTION = re.compile(r"^\s+Function : (\w+)")
_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);\s+/\* 0x[0-9a-f]{16} \*/")
_SECOND_WORD = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/")
_BRANCH = re.compile(r"\bBRA(?:\.\w+)* (?:\S+, )*(0x[0-9a-f]+)")
# Of the 64 upper bits of an instruction, those that schedule it: for how long its warp issues no
# other, the barrier of six that its result sets and the barriers that it waits for.
_STALL_SHIFT, _STALL_MASK = 41, 0xF
_SETS_SHIFT, _SETS_MASK = 46, 0x7
_WAITS_SHIFT = 52
NUM_BARRIERS = 6


class Instruction(NamedTuple):
    address: int
    text: str
    control: int

    @property
    def operation(self) -> str:
        """With its suffixes, without its predicate."""
        return _operation_of(self.text)

    @property
    def kind(self) -> str:
        return self.operation.split(".")[0]

    @property
    def stall(self) -> int:
        return self.control >> _STALL_SHIFT & _STALL_MASK

    @property
    def barrier_set(self) -> int | None:
        barrier = self.control >> _SETS_SHIFT & _SETS_MASK
        return barrier if barrier < NUM_BARRIERS else None

    @property
    def barriers_awaited(self) -> list[int]:
        waits = self.control >> _WAITS_SHIFT
        return [barrier for barrier in range(NUM_BARRIERS) if waits >> barrier & 1]

    @property
    def target(self) -> int | None:
        """Where it branches to."""
        return _target_of(self.text)


@functools.cache
def _operation_of(text: str) -> str:
    return re.sub(r"^@!?U?P\w+ +", "", text).split()[0]


@functools.cache
def _target_of(text: str) -> int | None:
    match = _BRANCH.search(text)
    return int(match[1], 16) if match else None


class Loop(NamedTuple):
    body: list[Instruction]

    @property
    def num_products(self) -> int:
        return sum(line.kind in PRODUCTS for line in self.body)

    def describe(self) -> str:
        kinds = Counter(line.kind for line in self.body).most_common(14)
        return (
            f"{len(self.body):>5} instructions, {sum(line.stall for line in self.body):>5} cycles, "
            f"{self.num_products:>4} products: " + ", ".join(f"{kind} {n}" for kind, n in kinds)
        )


def find_disassembler() -> str:
    """Raises FileNotFoundError where there is none."""
    if found := shutil.which("cuobjdump"):
        return found
    triton = find_spec("triton")
    for folder in (triton and triton.submodule_search_locations) or []:
        path = Path(folder, "backends", "nvidia", "bin", "cuobjdump")
        if path.exists():
            return str(path)
    raise FileNotFoundError("no cuobjdump: it comes with the CUDA toolkit and with Triton's wheel")


@functools.cache
def read_kernels(path: Path) -> dict[str, list[Instruction]]:
    command = [find_disassembler(), "-sass", str(path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kernels: dict[str, list[Instruction]] = {}
    body: list[Instruction] = []
    for line in output.splitlines():
        if match := _FUNCTION.match(line):
            body = kernels.setdefault(match[1], [])
        elif match := _LINE.match(line):
            body.append(Instruction(int(match[1], 16), match[2].strip(), 0))
        elif (match := _SECOND_WORD.match(line)) and body:
            body[-1] = body[-1]._replace(control=int(match[1], 16))
    return dict(zip(readable_names(kernels), kernels.values(), strict=True))


def readable_names(symbols: Iterable[str]) -> list[str]:
    """What kernels are called in resources.txt."""
    names = "\n".join(symbols)
    plain = subprocess.run(["c++filt"], input=names, capture_output=True, text=True, check=True)
    short = (re.sub(r"lmi::cuda::|\(anonymous namespace\)::|^void ", "", name)
             for name in plain.stdout.splitlines())  # fmt: skip
    return [re.sub(r"\([^)]*\)$", "", name).replace(" ", "") for name in short]


def all_loops(kernel: list[Instruction]) -> list[Loop]:
    """The code between a branch and an earlier instruction that it goes back to; code that the
    compiler put elsewhere isn't in it."""
    return [
        Loop([one for one in kernel[: end + 1] if one.address >= line.target])
        for end, line in enumerate(kernel)
        if line.target is not None and line.target < line.address
    ]


def find_loops(kernel: list[Instruction]) -> list[Loop]:
    """Those with products; of loops with the same ones, only the shortest."""
    found: dict[frozenset[int], Loop] = {}
    for loop in all_loops(kernel):
        body = loop.body
        key = frozenset(one.address for one in body if one.kind in PRODUCTS)
        if key and (key not in found or len(body) < len(found[key].body)):
            found[key] = loop
    return list(found.values())


def main() -> int:
    if not 2 <= len(sys.argv) <= 3:
        print(__doc__, file=sys.stderr)
        return 2
    pattern = sys.argv[2] if len(sys.argv) == 3 else ""
    for path in sorted(Path(sys.argv[1]).rglob("*.cu.o")):
        for name, kernel in sorted(read_kernels(path).items()):
            if pattern not in name:
                continue
            for loop in find_loops(kernel):
                print(f"{name}\n  {loop.describe()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
