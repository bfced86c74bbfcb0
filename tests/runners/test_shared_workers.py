"""Models of one process: each computes on as many threads, and on the cores, that it asks for."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from lmi_core.demo import MODEL_DIR
from lmi_core.engine.engine import Engine
from lmi_core.runners.cpu.cpu_runner import SharedWorkers
from tests.engine.test_invariance import Outcome, outcome
from tests.runners.test_ranks import REQUESTS, answers, config_of

CORES = sorted(os.sched_getaffinity(0))


def tasks(name: str) -> list[Path]:
    """This process's threads of such a name, once all of them sleep."""
    while True:
        found = []
        with suppress(FileNotFoundError):  # another thread has ended meanwhile
            for task in Path("/proc/self/task").iterdir():
                if (task / "comm").read_text().startswith(name):
                    found.append((task, (task / "status").read_text()))
            if all("State:\tS" in status for _, status in found):
                return [task for task, _ in found]


def pool_ns() -> Mapping[str, int]:
    """Processor time that each helper of this process's workers has had."""
    return {
        task.name: int((task / "schedstat").read_text().split()[0]) for task in tasks("lmi-pool")
    }


def worker_cores() -> set[int]:
    [task] = tasks("lmi-worker")
    return os.sched_getaffinity(int(task.name))


async def answers_of(engine: Engine) -> list[Outcome]:
    return [await outcome(engine, request) for request in REQUESTS]


@pytest.mark.parametrize("threads", [(1, 3), (3, 1)])
def test_each_model_has_the_threads_it_asks_for_whichever_came_first(
    threads: tuple[int, ...],
) -> None:
    alone = answers(config_of(MODEL_DIR, 1))

    async def main() -> None:
        async with AsyncExitStack() as opened:
            engines = {}
            for number in threads:
                config = config_of(MODEL_DIR, 1, num_threads=number)
                engines[number] = await opened.enter_async_context(Engine(config))
            for number, engine in engines.items():
                assert engine.info.runner.num_threads == number
            assert len(pool_ns()) == 2
            before = pool_ns()
            assert await answers_of(engines[1]) == alone
            assert pool_ns() == before
            assert await answers_of(engines[3]) == alone
            assert min(pool_ns()[each] - before[each] for each in before) > 0
            assert await asyncio.gather(*map(answers_of, engines.values())) == [alone, alone]
        assert not pool_ns()

    asyncio.run(main())


def test_models_on_as_many_threads_share_them() -> None:
    first = SharedWorkers.acquire(3)
    assert SharedWorkers.acquire(3) is first
    other = SharedWorkers.acquire(2)
    assert (first.num_threads, other.num_threads, len(pool_ns())) == (3, 2, 3)
    SharedWorkers.release(first)
    assert len(pool_ns()) == 3
    SharedWorkers.release(first)
    assert len(pool_ns()) == 1
    SharedWorkers.release(other)
    assert not pool_ns()


@pytest.mark.skipif(len(CORES) < 2, reason="nothing to bind ranks to")
@pytest.mark.parametrize("is_first", [True, False])
def test_ranks_beside_a_wider_model_keep_to_their_cores(is_first: bool) -> None:
    ranked = config_of(MODEL_DIR, 2, cpu_binding="cores", num_threads=1)
    wider = config_of(MODEL_DIR, 1, num_threads=2)
    alone = {1: answers(wider), 2: answers(ranked)}

    async def main() -> None:
        async with AsyncExitStack() as opened:
            configs = [ranked, wider] if is_first else [wider, ranked]
            engines = {
                config.tensor_parallel_degree: await opened.enter_async_context(Engine(config))
                for config in configs
            }
            assert {n: each.info.runner.num_threads for n, each in engines.items()} == {1: 2, 2: 1}
            before = pool_ns()
            assert await answers_of(engines[2]) == alone[2]
            assert pool_ns() == before
            assert worker_cores() < set(CORES)
            assert await answers_of(engines[1]) == alone[1]
            assert pool_ns() != before
            assert worker_cores() == set(CORES)

    asyncio.run(main())


def test_what_a_model_says_of_its_threads_beside_others_is_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        config = config_of(MODEL_DIR, 1, num_threads=2)
        async with Engine(config), Engine(config_of(MODEL_DIR, 1)):
            pass

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    assert "steps of all models run one after the other, this one's on 1 threads" in caplog.text
