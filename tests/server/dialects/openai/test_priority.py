"""The field ``priority``: lower ones run first, equal ones in the order of arrival."""

from __future__ import annotations

import asyncio
import threading

from lmi_server.http.metrics import Metrics
from tests.engine.fake_runner import FakeRunner
from tests.engine.harness import make_engine
from tests.server.harness import eventually, serving_backend

PRIORITIES = (None, 3, 2, -1, 2)


def test_who_is_more_urgent_runs_first() -> None:
    ends: list[int] = []

    async def run() -> None:
        all_there = threading.Event()
        runner = FakeRunner(max_num_seqs=1)
        runner.fail_step = lambda number: "" if all_there.wait(20) else "not all came"
        async with (
            make_engine(runner, eos_ids=()) as engine,
            serving_backend(engine, Metrics()) as served,
        ):

            async def ask(number: int) -> None:
                body = {"model": "model", "prompt": "a", "priority": PRIORITIES[number]}
                answer = await served.post(body, "/v1/completions")
                assert answer.status == 200, answer.body
                ends.append(number)

            tasks = []
            for number in range(len(PRIORITIES)):
                tasks.append(asyncio.create_task(ask(number)))
                await eventually(lambda: engine.stats().totals.num_requests == len(tasks))
            all_there.set()
            await asyncio.gather(*tasks)

    asyncio.run(run())
    assert ends == [3, 0, 2, 4, 1]  # the first gives way to the only one that is more urgent
