"""The simulator of a step's phases on many cores: its arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.many_cores import DESIGNS, Design, Machine, Phase, simulate

LINEAR = Phase("linear", num_chunks=12, cpu_s=120e-6)
NORM = Phase("norm", num_chunks=1, cpu_s=1e-6)


def free(num_cores: int) -> Machine:
    """Where nothing costs anything but the chunks."""
    return Machine(num_cores, near_s=0, far_s=0, remote_s=0, read_s=0, publish_s=0)


def test_one_core_takes_the_sum_of_the_chunks() -> None:
    share = simulate([NORM, LINEAR], Machine(1), DESIGNS["flat"])
    assert share.total_s == pytest.approx(121e-6 + 2 * Machine(1).publish_s)
    assert share.work_s == pytest.approx(121e-6)
    assert share.grain_s == pytest.approx(0)


def test_chunks_that_cores_do_not_divide_leave_cores_idle() -> None:
    share = simulate([LINEAR], free(8), DESIGNS["flat"])
    assert share.work_s == pytest.approx(15e-6)
    assert share.total_s == pytest.approx(20e-6)  # two rounds
    assert share.grain_s == pytest.approx(5e-6)
    assert share.sync_s == pytest.approx(0)
    finer = replace(LINEAR, num_chunks=48)
    assert simulate([finer], free(8), DESIGNS["flat"]).total_s == pytest.approx(15e-6)


def test_memory_is_read_at_the_machines_rate() -> None:
    phase = Phase("linear", num_chunks=64, cpu_s=64e-6, num_bytes=2e6)
    assert simulate([phase], free(64), DESIGNS["flat"]).total_s == pytest.approx(10e-6)
    assert simulate([phase], free(64), DESIGNS["nodes"]).total_s == pytest.approx(5e-6)


@pytest.mark.parametrize("num_cores", [8, 12, 64])
@pytest.mark.parametrize("num_chunks", [1, 7, 9, 100])
def test_counters_hand_out_every_chunk_once(num_cores: int, num_chunks: int) -> None:
    phase = Phase("attention", num_chunks, cpu_s=num_chunks * 1e-6)
    for name in ("flat", "counters"):
        share = simulate([phase], free(num_cores), DESIGNS[name])
        assert share.total_s == pytest.approx(-(-num_chunks // num_cores) * 1e-6)


def test_a_line_that_all_take_costs_each_a_turn() -> None:
    phase = Phase("attention", num_chunks=16, cpu_s=16e-6)
    machine = Machine(16, near_s=100e-9, far_s=100e-9, read_s=0, publish_s=0)
    flat = simulate([phase], machine, Design()).total_s
    shared = simulate([phase], machine, Design(counter_cores=4)).total_s
    assert flat > 1e-6 + 10 * 100e-9
    assert shared < flat - 5 * 100e-9


def test_a_phase_of_one_chunk_is_heard_of_by_nobody() -> None:
    machine = Machine(64)
    alone = simulate([NORM] * 10, machine, DESIGNS["alone"])
    assert alone.total_s == pytest.approx(10 * (1e-6 + machine.publish_s))
    assert alone.total_s < simulate([NORM] * 10, machine, DESIGNS["flat"]).total_s
