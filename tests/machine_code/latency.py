"""What a memory's latency leaves of CUDA kernels' speed, by their machine code; no GPU is needed.

Of each kernel: the blocks that a multiprocessor holds, the bytes that its main loop keeps under
way there, loops of compare-and-swap, and what it reads from the L2 cache over what its operands
have. Of the main loop, the one that reads most, a lone warp is followed: an instruction is issued
when the barriers that it names are there, a load's `LATENCY` cycles after it. Bytes under way are
those of the loads issued while it waits for one of them, times the resident warps; where it never
waits, the most at any time. The memory is busy only with enough of them. Of kernels that are bound
by memory, `predict` says which share of its rate the loop can have; what comes before the loop and
after it, and blocks that end late, are not in it. Needs cuobjdump, as loops.py does.
"""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from loops import (
    PRODUCTS,
    Instruction,
    Loop,
    all_loops,
    find_disassembler,
    read_kernels,
    readable_names,
)

LATENCY = 800
"""Cycles from a load to its bytes: about those of HBM3 that isn't busy, at 1.7 GHz."""
OTHER_LATENCY = 30
"""Of shared memory, shuffles and slow arithmetic."""
LEAST_IN_FLIGHT = 32 << 10
"""Bytes of a multiprocessor: 4.3 TB/s of 132, as long as loads take on a busy memory."""
MOST_L2_READS = 3.2
"""Times the operands: what 64 rows of 16 bits and int4 weights take in tiles of 128 outputs."""
MOST_WAITING = 0.1
"""Of its time, for a warp that needs no more under way: what it does with them takes longer."""
MOST_SPILLING = 0.01
"""Of a loop's instructions. What a loop reads of it once a turn of thousands costs nothing."""
MULTIPROCESSORS = 132
USUAL_THREADS = 256
"""Of blocks of kernels whose machine code doesn't bound them."""
# Of a multiprocessor of sm_90 (CUDA programming guide, "Compute Capabilities").
_MOST_WARPS, _MOST_BLOCKS, _REGISTERS, _SHARED_BYTES = 64, 32, 65536, 228 << 10
_SCHEDULERS, _REGISTER_UNIT, _BLOCK_SHARED_BYTES = 4, 256, 1 << 10
_WARP_SIZE = 32
# A cycle, at 1.7 GHz: bytes of 4.3 TB/s; bytes of the L2 cache, half of what its port takes (an
# estimate). Cycles of a product of 16 x 8 x 16 by `mma`, at three fifths of the 989 TFLOP/s that
# only `wgmma` reaches (an estimate); of bytes it has twice the inputs.
_MEMORY_BYTES, _L2_BYTES, _PRODUCT_CYCLES = 19.2, 32.0, 1.6
_BUSY_LATENCY = round(LEAST_IN_FLIGHT / _MEMORY_BYTES)
_LOADS = ("LDG", "LDGSTS", "LD")
_MACS = {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8, "16832": 16 * 8 * 32}
_FUNCTION = re.compile(r"^\.nv\.info\.(\w+)")
_PENDING = re.compile(r"SB(\d), (0x[0-9a-f]+)")


class Launch(NamedTuple):
    """How a kernel is launched that is bound by memory, for a product of an 8B model."""

    blocks: int
    """Of its smallest grid."""
    shared_bytes: int = 0
    """Those asked for at launch."""
    rows: int = 0
    weight_bits: float = 0
    input_bits: float = 0
    outputs: int = 4096


LAUNCHES = {
    "linear_few_rows_kernel<*>": Launch(256, 49152, 8, 16, 16),
    "linear_packed_kernel<*,1,*>": Launch(128, 61440, 8, 4.25, 16),
    "linear_packed_kernel<*,2,*>": Launch(128, 61440, 16, 4.25, 16),
    "packed_expert_rows_kernel<*,1,*>": Launch(128, 61440, 8, 4.25, 16),
    "packed_expert_rows_kernel<*,2,*>": Launch(128, 61440, 16, 4.25, 16),
    "packed_expert_tiles_kernel<*,1,*>": Launch(128, 86016, 32, 4.25, 16),
    "packed_expert_tiles_kernel<*,2,*>": Launch(256, 79872, 64, 4.25, 16),
    "few_expert_rows_kernel<*>": Launch(256, 49152, 8, 16, 16),
    "packed_tiles_kernel<*,1,*>": Launch(128, 86016, 32, 4.25, 16),
    "packed_tiles_kernel<*,2,*>": Launch(256, 79872, 64, 4.25, 16),
    "linear_quantized_kernel<Fp8<true>,1>": Launch(128, 101376, 16, 8.25, 8),
    "linear_quantized_kernel<Fp8<true>,2>": Launch(128, 101376, 32, 8.25, 8),
    "linear_quantized_kernel<Fp8<true>,4>": Launch(128, 101376, 64, 8.25, 8),
    "quantized_expert_rows_kernel<Fp8<true>,1>": Launch(128, 101376, 16, 8.25, 8),
    "quantized_expert_rows_kernel<Fp8<true>,2>": Launch(128, 101376, 32, 8.25, 8),
    "quantized_expert_rows_kernel<Fp8<true>,4>": Launch(128, 101376, 64, 8.25, 8),
    "quantized_expert_rows_kernel<*,1>": Launch(128, 98304, 16, 8, 8),
    "quantized_expert_rows_kernel<*,2>": Launch(128, 98304, 32, 8, 8),
    "quantized_expert_rows_kernel<*,4>": Launch(128, 98304, 64, 8, 8),
    "linear_quantized_kernel<*,1>": Launch(128, 98304, 16, 8, 8),
    "linear_quantized_kernel<*,2>": Launch(128, 98304, 32, 8, 8),
    "linear_quantized_kernel<*,4>": Launch(128, 98304, 64, 8, 8),
    "decode_attention_kernel<*,128,false>": Launch(2048, 104448),
}


class Prediction(NamedTuple):
    share: float
    """Of the rate at which the memory is read."""
    bound: str


class Latency(NamedTuple):
    blocks: int
    in_flight: int
    looping_atomics: int
    l2_reads: float
    """Over the operands' bytes; 0 of what is no product."""
    waiting: float
    """The part of a lone warp's time in which it waits for loads."""
    spilling: float
    """The part of a loop's instructions that move what registers have no room for, of the loop with
    the largest."""
    prediction: Prediction | None
    """Of kernels that are bound by memory."""


def launch_of(name: str) -> Launch | None:
    return next((one for pattern, one in LAUNCHES.items() if fnmatch(name, pattern)), None)


def read_threads(path: Path) -> dict[str, int]:
    """The most threads of a block, of each kernel of an object."""
    command = [find_disassembler(), "-elf", str(path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    threads: dict[str, int] = {}
    name, is_threads = "", False
    for line in output.splitlines():
        if match := _FUNCTION.match(line):
            name = match[1]
        elif "Attribute:" in line:
            is_threads = "EIATTR_MAX_THREADS" in line
        elif is_threads and "Value:" in line:
            threads[name] = int(line.split()[1], 16)
    return dict(zip(readable_names(threads), threads.values(), strict=True))


def resident_blocks(registers: int, shared_bytes: int, num_threads: int) -> int:
    """How many blocks a multiprocessor holds at once."""
    warps = -(-num_threads // _WARP_SIZE)
    own = -(-registers * _WARP_SIZE // _REGISTER_UNIT) * _REGISTER_UNIT
    by_registers = _REGISTERS // _SCHEDULERS // own * _SCHEDULERS // warps
    by_shared = _SHARED_BYTES // (shared_bytes + _BLOCK_SHARED_BYTES)
    return min(by_registers, by_shared, _MOST_WARPS // warps, _MOST_BLOCKS)


def bytes_read(line: Instruction) -> int:
    """From global memory, by a warp."""
    return _bytes_of(line.operation)


@functools.cache
def _bytes_of(operation: str) -> int:
    kind, *suffixes = operation.split(".")
    if kind not in _LOADS:
        return 0
    sizes = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
    return _WARP_SIZE * next((sizes[one] for one in suffixes if one in sizes), 4)


def main_loop(kernel: list[Instruction]) -> Loop | None:
    """Of loops that have none within them, the one that reads most."""
    loops = [loop for loop in all_loops(kernel) if any(map(bytes_read, loop.body))]
    spans = [(loop.body[0].address, loop.body[-1].address) for loop in loops]
    inner = [
        loop
        for loop, (first, last) in zip(loops, spans, strict=True)
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in spans)
    ]
    return max(inner, key=lambda loop: sum(map(bytes_read, loop.body)), default=None)


def spilling_of(kernel: list[Instruction]) -> float:
    shares = (
        sum(line.kind in ("LDL", "STL") for line in loop.body) / len(loop.body)
        for loop in all_loops(kernel)
    )
    return max(shares, default=0.0)


def turn_of(loop: Loop) -> Iterator[Instruction]:
    """What a turn issues: jumps that hang on nothing are taken, others within it are not."""
    places = {line.address: at for at, line in enumerate(loop.body)}
    at = 0
    while at < len(loop.body):
        line = loop.body[at]
        yield line
        is_taken = line.kind == "BRA" and not line.text.startswith("@")
        at = places.get(line.target or 0, at + 1) if is_taken and at else at + 1
        if at == 0:
            return


class Warp:
    """A lone one, that goes through a loop; loads take it ``latency``."""

    def __init__(self, latency: int) -> None:
        self.now = 0
        self._latency = latency
        self._pending: dict[int, list[int]] = {}
        self._copies: list[int] = []
        self._loads: list[tuple[int, int]] = []
        self._waited = 0
        self._weighted_bytes = 0
        self._most_bytes = 0

    @property
    def waiting(self) -> float:
        return self._waited / self.now

    @property
    def bytes_under_way(self) -> float:
        return self._weighted_bytes / self._waited if self._waited else self._most_bytes

    def issue(self, line: Instruction) -> None:
        for barrier in line.barriers_awaited:
            self._wait(self._pending.pop(barrier, []))
        if line.kind == "DEPBAR" and (match := _PENDING.search(line.text)):
            ends = sorted(self._pending.get(int(match[1]), []))
            num_done = len(ends) - min(int(match[2], 16), len(ends))
            self._wait(ends[:num_done])
            self._pending[int(match[1])] = ends[num_done:]
        num_bytes = bytes_read(line)
        end = self.now + (self._latency if num_bytes else OTHER_LATENCY)
        if num_bytes:
            self._loads = [load for load in self._loads if load[0] > self.now]
            self._loads.append((end, num_bytes))
            self._most_bytes = max(self._most_bytes, self._outstanding())
        if line.kind == "LDGSTS":
            self._copies.append(end)
        elif line.kind == "LDGDEPBAR":
            end, self._copies = max([self.now, *self._copies]), []
        if line.barrier_set is not None and line.kind != "LDGSTS":
            self._pending.setdefault(line.barrier_set, []).append(end)
        self.now += max(line.stall, 1)

    def _outstanding(self) -> int:
        return sum(num_bytes for end, num_bytes in self._loads if end > self.now)

    def _wait(self, ends: Sequence[int]) -> None:
        waited = max([self.now, *ends]) - self.now
        if waited > OTHER_LATENCY:
            self._waited += waited
            self._weighted_bytes += waited * self._outstanding()
        self.now += waited


def follow(turn: Sequence[Instruction], num_turns: int = 8, latency: int = LATENCY) -> Warp:
    warp = Warp(latency)
    for _ in range(num_turns):
        for line in turn:
            warp.issue(line)
    return warp


def l2_reads(turn: Sequence[Instruction], launch: Launch) -> float:
    """Of a product's turn, which reads so much for so many multiplications."""
    macs = sum(
        _MACS.get(one, 0)
        for line in turn
        if line.kind in PRODUCTS
        for one in line.operation.split(".")
    )
    operands = launch.weight_bits / 8 + launch.rows / launch.outputs * launch.input_bits / 8
    if not macs or not operands:
        return 0.0
    return sum(map(bytes_read, turn)) / macs * launch.rows / operands


def predict(turn: Sequence[Instruction], warps: float, l2: float) -> Prediction:
    """By what the resident warps' turns take of each thing that they share. ``l2``: as
    ``l2_reads``, of whose bytes the operands' own come from the memory."""
    num_bytes = warps * sum(map(bytes_read, turn))
    num_products = sum(
        0.5 if "1688" in line.operation else 1 for line in turn if line.kind in PRODUCTS
    )
    memory = num_bytes / max(l2, 1.0) / _MEMORY_BYTES
    idle, busy = (_cycles_of(turn, latency) for latency in (LATENCY, _BUSY_LATENCY))
    # Loads take the longer the busier the memory is: share * (idle + share * slower) = memory.
    slower = max(busy - idle, 1e-9)
    shares = {
        "the memory": 1.0,
        "the L2 cache": memory / (num_bytes / _L2_BYTES),
        "instructions": memory / (warps * len(turn) / _SCHEDULERS),
        "products": memory / max(warps * num_products * _PRODUCT_CYCLES, 1e-9),
        "latency": ((idle**2 + 4 * slower * memory) ** 0.5 - idle) / (2 * slower),
    }
    bound = min(shares, key=shares.__getitem__)
    return Prediction(shares[bound], bound)


def _cycles_of(turn: Sequence[Instruction], latency: int) -> float:
    """Of one turn; the first ones find copies that the code before the loop began."""
    return (follow(turn, 16, latency).now - follow(turn, 8, latency).now) / 8


def measure(
    name: str, kernel: list[Instruction], num_threads: int, registers: int, shared_bytes: int
) -> Latency:
    launch = launch_of(name)
    blocks = resident_blocks(
        registers, shared_bytes + (launch.shared_bytes if launch else 0), num_threads
    )
    atomics = sum(line.kind.startswith("ATOM") and "CAS" in line.operation for line in kernel)
    loop, spilling = main_loop(kernel), spilling_of(kernel)
    if loop is None:
        return Latency(blocks, 0, atomics, 0.0, 0.0, spilling, None)
    turn = list(turn_of(loop))
    used = min(blocks, launch.blocks / MULTIPROCESSORS) if launch else blocks
    warps = used * -(-num_threads // _WARP_SIZE)
    followed = follow(turn)
    in_flight = int(followed.bytes_under_way * warps)
    l2 = round(l2_reads(turn, launch), 2) if launch else 0.0
    prediction = predict(turn, warps, l2) if launch else None
    return Latency(blocks, in_flight, atomics, l2, followed.waiting, spilling, prediction)


def faults_of(name: str, found: Latency) -> list[str]:
    """Where the kernel is worse than the bars."""
    faults = []
    if found.spilling > MOST_SPILLING:
        faults.append(f"{found.spilling:.1%} of a loop is spilling, {MOST_SPILLING:.0%} at most")
    if found.looping_atomics:
        faults.append(f"{found.looping_atomics} atomics that loop")
    is_waiting = found.waiting > MOST_WAITING and launch_of(name) is not None
    if is_waiting and found.in_flight < LEAST_IN_FLIGHT:
        faults.append(f"{found.in_flight / 1024:.1f} KiB under way, {LEAST_IN_FLIGHT >> 10} wanted")
    if found.l2_reads > MOST_L2_READS:
        faults.append(f"L2 reads {found.l2_reads} times the operands, {MOST_L2_READS} at most")
    return faults


def read_latencies(
    build_dir: Path, resources: Mapping[str, tuple[int, int, int]]
) -> dict[str, Latency]:
    """``resources``: of each kernel registers, spilled bytes, static shared bytes."""
    found = {}
    for path in sorted(build_dir.rglob("*.cu.o")):
        kernels = read_kernels(path)
        threads = read_threads(path) if kernels else {}
        for name, kernel in kernels.items():
            registers, _, shared_bytes = resources[name][:3]
            found[name] = measure(
                name, kernel, threads.get(name, USUAL_THREADS), registers, shared_bytes
            )
    return found
