"""Who is in a step that is planned while the one before it is computed, and when."""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import replace

import pytest

from lmi_core.engine import loop
from lmi_core.engine.engine import Engine
from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import EngineError
from tests.engine.fake_runner import FakeRunner
from tests.engine.harness import (
    assert_nothing_leaked,
    collect,
    make_engine,
    run,
    token_ids,
    until,
)
from tests.engine.oracle import expected_tokens

PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)


def test_prompts_go_on_ahead() -> None:
    async def main() -> None:
        prompt = list(range(200))
        params = replace(PARAMS, max_new_tokens=4, repetition_penalty=1.2)
        runner = FakeRunner(runs_ahead=True)
        async with make_engine(runner) as engine:
            events = await collect(engine, prompt, params)
            assert token_ids(events) == expected_tokens(prompt, params)
            assert runner.num_ahead == 200 // 64 + 3

    run(main())


def test_arrivals_come_in_while_others_run_ahead() -> None:
    """No step waits for the one before it from the first to the last, whoever comes and ends."""

    async def main() -> None:
        runner = FakeRunner(runs_ahead=True, step_s=0.0005, num_blocks=200)
        async with make_engine(runner) as engine:
            first = asyncio.create_task(collect(engine, [1], replace(PARAMS, max_new_tokens=200)))
            await until(lambda: runner.num_ahead >= 5)
            for number in range(2, 6):
                prompt = [number] * 40
                events = await collect(engine, prompt, PARAMS)
                assert token_ids(events) == expected_tokens(prompt, PARAMS)
            assert not first.done()
            assert runner.num_ahead >= engine.stats().totals.num_steps - 1
            await first

    run(main())


def test_who_comes_before_a_step_nears_its_end_is_in_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "MAX_AHEAD_S", 1e3)

    async def main() -> None:
        runner = FakeRunner(runs_ahead=True)
        runner.claimed_s = 10.0
        has_come, is_wanted = threading.Event(), asyncio.Event()
        turns = asyncio.get_running_loop()

        def wait(number: int) -> str:
            if number == 5:
                turns.call_soon_threadsafe(is_wanted.set)
                has_come.wait(10)
            return ""

        runner.fail_step = wait
        async with make_engine(runner) as engine:
            first = asyncio.create_task(collect(engine, [1], PARAMS))
            await is_wanted.wait()
            other = asyncio.create_task(anext(engine.generate([1, 2, 3], PARAMS)))
            await until(lambda: engine.stats().num_waiting > 0)
            has_come.set()
            await other
            assert engine.stats().totals.num_steps == 7  # its own is the one behind number 5
            await first

    run(main())


def test_a_step_is_submitted_before_the_end_of_the_last_one() -> None:
    async def main() -> None:
        runner = FakeRunner(runs_ahead=True, step_s=0.02)
        runner.claimed_s = 0.01
        async with make_engine(runner) as engine:
            events = await collect(engine, [1, 2, 3], PARAMS)
            assert token_ids(events) == expected_tokens([1, 2, 3], PARAMS)
            assert runner.num_ahead > 1  # not only until it was known what steps take

    run(main())


def test_nothing_is_submitted_behind_long_steps() -> None:
    async def main() -> None:
        runner = FakeRunner(runs_ahead=True)
        runner.claimed_s = 2 * loop.MAX_AHEAD_S
        async with make_engine(runner) as engine:
            await collect(engine, [1, 2, 3], PARAMS)
            assert runner.num_ahead == 1  # before anything is known

    run(main())


def test_who_shares_a_prompt_in_flight_waits_for_it() -> None:
    """So that its blocks are found, as without running ahead."""

    async def main(runner: FakeRunner) -> int:
        async with make_engine(runner) as engine:
            first = asyncio.create_task(collect(engine, list(range(64)), PARAMS))
            await until(lambda: engine.stats().num_running > 0)
            events = await collect(engine, [*range(64), 7], PARAMS)
            assert token_ids(events) == expected_tokens([*range(64), 7], PARAMS)
            await first
        return runner.num_computed_tokens

    assert run(main(FakeRunner(runs_ahead=True, step_s=0.01))) == 64 + 23 + 1 + 23


def test_choices_fork_from_a_prompt_that_was_ahead() -> None:
    params = replace(PARAMS, n=3, temperature=1.0, seed=5)

    async def main() -> None:
        runner = FakeRunner(runs_ahead=True, step_s=0.0005)
        async with make_engine(runner) as engine:
            first = asyncio.create_task(collect(engine, [1], replace(PARAMS, max_new_tokens=99)))
            await until(lambda: runner.num_ahead >= 5)
            events = await collect(engine, [1, 2, 3], params)
            for choice in range(3):
                expected = expected_tokens([1, 2, 3], params, seed=5, choice=choice)
                assert token_ids(events, choice) == expected
            await first
            await assert_nothing_leaked(engine)

    run(main())


@pytest.mark.parametrize("seed", range(6))
def test_random_arrivals_aborts_and_failures(seed: int) -> None:
    """Who isn't hit gets the tokens of one who is alone; memory is short in every second run."""
    rng = random.Random(seed)
    num_blocks = 200 if seed % 2 else 14
    runner = FakeRunner(runs_ahead=True, num_blocks=num_blocks)
    runner.fails_late = bool(rng.randrange(2))
    failing = {25, 60, 61} if seed < 4 else set[int]()
    runner.fail_step = lambda number: "out of luck" if number in failing else ""

    async def one(engine: Engine, number: int) -> None:
        for _ in range(rng.randrange(60)):
            await asyncio.sleep(0)
        prompt = [number % 3, *range(rng.choice([3, 30, 90]))]
        params = replace(PARAMS, max_new_tokens=rng.choice([1, 5, 40]), n=rng.choice([1, 1, 1, 2]))
        if rng.randrange(4) == 0:
            params = replace(params, presence_penalty=0.5)
        request = GenerationRequest(
            request_id=str(number), prompt_token_ids=tuple(prompt), params=params
        )
        events: list[TokenEvent] = []
        num_wanted = rng.choice([2, 200, 200])
        is_cut = False
        try:
            async for event in engine.generate(request):
                events.append(event)
                if len(events) == num_wanted:
                    engine.abort(str(number))
                    is_cut = True
        except EngineError as error:
            is_cut = "out of luck" in str(error)
        for choice in range(params.n):
            got = token_ids([e for e in events if e.token_id >= 0], choice)
            expected = expected_tokens(prompt, params, choice=choice)
            assert got == (expected[: len(got)] if is_cut else expected)

    async def main() -> None:
        async with make_engine(runner) as engine:
            await asyncio.gather(*(one(engine, number) for number in range(30)))
            await assert_nothing_leaked(engine)
        assert runner.num_ahead > 0

    run(main())


def test_seldom_is_a_step_submitted_too_late() -> None:
    """Whether steps take nearly always as long as thought or half as long at times."""
    for spread in (0.0, 0.05, 0.5):
        rng = random.Random(1)
        lead, num_late, early_s = loop.LEAD_PART, 0, 0.0
        for _ in range(4000):
            due_s = (1.0 - lead) * 0.1 - loop.LEAD_S
            ends_s = 0.1 * (1.0 - spread * rng.random())
            lead = loop.next_lead(lead, is_late=due_s > ends_s)
            num_late += due_s > ends_s
            early_s += max(ends_s - due_s, 0.0)
        assert num_late <= 1.5 * loop.LATE_SHARE * 4000
        assert early_s / 4000 <= 0.1 * (spread + 0.1)
