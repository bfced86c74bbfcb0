"""tests/machine_code/latency.py follows a warp through a kernel's main loop."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
NO_BARRIER = 7


@pytest.fixture
def latency(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import latency

    yield latency
    for name in ("latency", "loops"):
        sys.modules.pop(name, None)


def kernel_of(latency, *lines: tuple[str, int, int]) -> list[object]:
    """Of lines with the barrier that they set and a mask of those they wait for; a cycle each."""
    return [
        latency.Instruction(16 * at, text, 1 << 41 | sets << 46 | waits << 52)
        for at, (text, sets, waits) in enumerate(lines)
    ]


LOAD, USE = "LDG.E.128 R8, desc[UR4][R4.64]", "HMMA.16816.F32.BF16 R8, R4, R2, R8"
ADD = ("IADD3 R6, R6, R2, RZ", NO_BARRIER, 0)
NEXT = ("@!P0 BRA 0x0", NO_BARRIER, 0)
ONE_BY_ONE = ((LOAD, 0, 0), (USE, NO_BARRIER, 1), (LOAD, 0, 0), (USE, NO_BARRIER, 1), NEXT)
AT_ONCE = ((LOAD, 0, 0), (LOAD, 0, 0), (USE, NO_BARRIER, 1), (USE, NO_BARRIER, 0), NEXT)


@pytest.mark.parametrize(("lines", "num_bytes"), [(ONE_BY_ONE, 512), (AT_ONCE, 1024)])
def test_loads_before_the_first_use_are_under_way_together(latency, lines, num_bytes: int) -> None:
    kernel = kernel_of(latency, *lines)
    turn = list(latency.turn_of(latency.main_loop(kernel)))
    assert latency.follow(turn).bytes_under_way == num_bytes
    found = latency.measure("any", kernel, 256, 32, 0)
    warps = 64
    assert (found.blocks, found.in_flight) == (8, num_bytes * warps)


@pytest.mark.parametrize("num_pending", [0, 2])
def test_copies_are_waited_for_by_their_groups(latency, num_pending: int) -> None:
    """So many may be under way while another is used."""
    copy = ("LDGSTS.E.BYPASS.LTC128B.128 [R2], desc[UR4][R4.64]", NO_BARRIER, 0)
    wait = (f"DEPBAR.LE SB0, {num_pending:#x}", NO_BARRIER, 0)
    kernel = kernel_of(latency, copy, ("LDGDEPBAR", 0, 0), wait, NEXT)
    turn = list(latency.turn_of(latency.main_loop(kernel)))
    assert latency.follow(turn).bytes_under_way == pytest.approx(512 * (num_pending + 1), rel=0.1)


def test_the_main_loop_is_the_innermost_that_reads_most(latency) -> None:
    small, large = ("LDG.E R8, desc[UR4][R4.64]", 0, 0), (LOAD, 0, 0)
    kernel = kernel_of(
        latency, small, ("@P0 BRA 0x0", 7, 0), large, ("@P0 BRA 0x20", 7, 0), ("@P1 BRA 0x0", 7, 0)
    )
    assert [line.address for line in latency.main_loop(kernel).body] == [0x20, 0x30]
    assert latency.main_loop(kernel_of(latency, (LOAD, 0, 0), ("EXIT", 7, 0))) is None


def test_atomics_that_loop_are_counted(latency) -> None:
    kernel = kernel_of(
        latency, ("ATOMS.CAST.SPIN.64 P0, [R2], R4, R6", 0, 0), ("ATOMS.ADD R2, [R3], R4", 0, 0)
    )
    found = latency.measure("any", kernel, 32, 32, 0)
    assert found.looping_atomics == 1
    assert latency.faults_of("any", found) == ["1 atomics that loop"]


@pytest.mark.parametrize(
    ("lines", "warps", "l2", "share", "bound"),
    [
        (ONE_BY_ONE, 8, 1.0, 0.215, "latency"),
        (AT_ONCE, 8, 1.0, 0.375, "latency"),
        (AT_ONCE, 64, 1.0, 1.0, "the memory"),
        (AT_ONCE, 64, 3.0, 32 / 19.2 / 3, "the L2 cache"),
        (
            ((LOAD, 0, 0), *[(USE, NO_BARRIER, 1)] * 1000, NEXT),
            64,
            1.0,
            512 / 19.2 / 1600,
            "products",
        ),
        (((LOAD, 0, 0), *[ADD] * 1000, NEXT), 64, 1.0, 4 * 512 / 19.2 / 1002, "instructions"),
    ],
)
def test_what_bounds_a_loop(
    latency, lines: Sequence[tuple[str, int, int]], warps: int, l2: float, share: float, bound: str
) -> None:
    turn = list(latency.turn_of(latency.main_loop(kernel_of(latency, *lines))))
    found = latency.predict(turn, warps, l2)
    assert found.bound == bound
    assert found.share == pytest.approx(share, rel=0.01)


@pytest.mark.parametrize(("num_products", "is_fault"), [(10, True), (200, False)])
def test_spills_count_in_loops_by_their_share(latency, num_products: int, is_fault: bool) -> None:
    spill = ("STL [R1], R4", 7, 0)
    turn = [(LOAD, 0, 0), ("LDL R4, [R1]", 1, 0), *[(USE, 7, 1)] * num_products]
    kernel = kernel_of(latency, spill, spill, *turn, ("@!P0 BRA 0x20", 7, 0))
    found = latency.measure("any", kernel, 32, 32, 0)
    assert found.spilling == 1 / (num_products + 3)
    assert bool(latency.faults_of("any", found)) == is_fault


def test_bars_hold_for_kernels_bound_by_memory(latency) -> None:
    few = latency.Latency(
        blocks=2,
        in_flight=16 << 10,
        looping_atomics=0,
        l2_reads=8.5,
        waiting=0.5,
        spilling=0.0,
        prediction=None,
    )
    assert latency.faults_of("linear_packed_kernel<bf16,1,128>", few) == [
        "16.0 KiB under way, 32 wanted",
        "L2 reads 8.5 times the operands, 3.2 at most",
    ]
    busy = few._replace(waiting=0.0, l2_reads=3.0)
    assert latency.faults_of("linear_packed_kernel<bf16,1,128>", busy) == []


def test_reads_of_l2_are_those_of_all_tiles(latency) -> None:
    """512 bytes of weights and as many of rows, of 16 bits, for two products of 8 rows."""
    kernel = kernel_of(latency, (LOAD, 0, 0), (LOAD, 0, 0), *[(USE, 7, 1)] * 2, NEXT)
    turn = list(latency.turn_of(latency.main_loop(kernel)))
    launch = latency.Launch(blocks=1, rows=8, weight_bits=16, input_bits=16, outputs=1 << 20)
    assert latency.l2_reads(turn, launch) == pytest.approx(1024 / 4096 * 8 / 2, rel=1e-4)


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "num_threads", "blocks"),
    [(64, 4096, 256, 4), (255, 0, 256, 1), (32, 100 << 10, 128, 2), (16, 0, 32, 32)],
)
def test_resident_blocks(
    latency, registers: int, shared_bytes: int, num_threads: int, blocks: int
) -> None:
    assert latency.resident_blocks(registers, shared_bytes, num_threads) == blocks
