"""Ranks on the CPU, from the keys to what they compute."""

import asyncio

import pytest

from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams

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
