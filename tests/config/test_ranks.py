"""Ranks on the CPU, from the keys to what they compute."""

import asyncio
import os
from pathlib import Path

import pytest

from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.runners.cpu.core_groups import core_groups, cpu_list, found_cores

pytestmark = pytest.mark.timeout(120)

PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=0, logprobs=2)
ONE = "option.device=cpu\noption.num_threads=1\n"


def answer(config):
    async def main():
        async with Engine(config) as engine:
            events = [event async for event in engine.generate(range(10, 50), PARAMS)]
            return [(event.token_id, event.logprob) for event in events]

    return asyncio.run(main())


def test_a_degree_on_the_cpu_is_a_number_of_ranks(configured):
    config = configured(f"{ONE}option.tensor_parallel_degree=2\n")
    assert config.tensor_parallel_degree == 2
    tokens = [token for token, _ in answer(config)]
    assert tokens == [token for token, _ in answer(configured(ONE))]


def test_invariant_sums_are_asked_for(configured):
    whole = configured(f"{ONE}option.tp_invariant=true\n")
    ranks = configured(f"{ONE}option.tp_invariant=true\noption.tensor_parallel_degree=2\n")
    assert answer(whole) == answer(ranks)


def cpus_of_threads(pid):
    """Names of a process' threads, and where they may run."""
    threads = []
    for path in Path(f"/proc/{pid}/task").glob("*/status"):
        fields = dict(line.split(":", 1) for line in path.read_text().splitlines())
        cpus = tuple(cpu_list(fields["Cpus_allowed_list"]))
        threads.append((fields["Name"].strip(), cpus))
    return threads


def test_ranks_are_bound_to_cores(configured):
    allowed = os.sched_getaffinity(0)
    groups = core_groups(found_cores(allowed), 2, "cores")
    if groups is None:
        pytest.skip("one core")
    keys = "option.tensor_parallel_degree=2\noption.cpu_binding=cores\n"

    async def main():
        async with Engine(configured(ONE + keys)) as engine:
            assert len([event async for event in engine.generate(range(10, 50), PARAMS)]) == 12
            [pid] = engine._parts.runner._ranks.pids
            bound = cpus_of_threads(pid)
            assert {cpus for _, cpus in bound} == {groups[1]}
            ours = cpus_of_threads(os.getpid())
            assert [cpus for name, cpus in ours if name == "lmi-worker"] == [groups[0]]

    asyncio.run(main())
    assert os.sched_getaffinity(0) == allowed
