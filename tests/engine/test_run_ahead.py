"""Submitting steps before the last one's tokens are known changes nothing that anybody sees."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from lmi_core import _native
from lmi_core.engine.engine import Engine
from lmi_core.engine.outputs import FinishReason, TokenEvent
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import EngineError
from lmi_core.structured.grammar import Grammar
from tests.engine.fake_runner import FakeRunner
from tests.engine.harness import (
    EOS_ID,
    assert_nothing_leaked,
    collect,
    make_engine,
    run,
    token_ids,
    until,
)
from tests.engine.oracle import expected_tokens

PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)
GRAMMARS = [
    Grammar.regex("[a-z ]{30}"),
    Grammar.regex("[0-9]{1,5}"),
    Grammar.choice(["ab", "abc", "b"]),
    Grammar.json_schema({"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}),
]


def requests(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Of all kinds: those that can run ahead, that end early, and that can't while a prompt is
    scored."""
    rng = random.Random(seed)
    result = []
    for _ in range(12):
        prompt = [rng.randrange(200) for _ in range(rng.choice([1, 5, 16, 40]))]
        params = replace(PARAMS, max_new_tokens=rng.choice([1, 2, 9, 40]))
        kind = rng.randrange(8)
        if kind == 0:
            params = replace(params, ignore_eos=False, stop_token_ids=tuple(range(0, 200, 9)))
        elif kind == 1:
            params = replace(params, stop=("a", "Q"))
        elif kind == 2:
            params = replace(params, temperature=1.0, seed=rng.randrange(99), n=2)
        elif kind == 3:
            params = replace(params, presence_penalty=0.5)
        elif kind == 4:
            params = replace(params, prompt_logprobs=1, logprobs=1)
        elif kind == 5:
            params = replace(params, grammar=rng.choice(GRAMMARS), ignore_eos=False, n=2)
        elif kind == 6:
            params = replace(params, grammar=GRAMMARS[0], frequency_penalty=0.5)
        result.append((prompt, params))
    return result


def summary(events: list[TokenEvent]) -> list[tuple[Any, ...]]:
    return sorted(
        (e.choice, i, e.token_id, e.text, e.logprob, str(e.finish_reason))
        for i, e in enumerate(sorted(events, key=lambda event: event.choice))
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacities", [{}, {"num_blocks": 18}, {"max_num_seqs": 3}])
def test_same_events_as_the_plain_loop(seed: int, capacities: dict[str, int]) -> None:
    async def main(runner: FakeRunner, overlap: bool) -> list[list[tuple[Any, ...]]]:
        async with make_engine(runner, overlap=overlap) as engine:
            results = await asyncio.gather(
                *(collect(engine, *request) for request in requests(seed))
            )
            await assert_nothing_leaked(engine)
        return [summary(events) for events in results]

    ahead = FakeRunner(runs_ahead=True, **capacities)
    assert run(main(ahead, True)) == run(main(FakeRunner(**capacities), False))
    assert ahead.num_ahead > 0


def test_decodes_run_ahead_but_for_the_last_token() -> None:
    async def main() -> None:
        runner = FakeRunner(runs_ahead=True)
        async with make_engine(runner) as engine:
            events = await collect(engine, [1, 2, 3], PARAMS)
            assert token_ids(events) == expected_tokens([1, 2, 3], PARAMS)
            # All but the prompt, and nothing past the last.
            assert runner.num_ahead == PARAMS.max_new_tokens - 1
            assert runner.num_computed_tokens == 3 + PARAMS.max_new_tokens - 1

    run(main())


@pytest.mark.parametrize(
    "change",
    [
        {"presence_penalty": 0.5},
        {"min_new_tokens": 20, "ignore_eos": False},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.1, "temperature": 0.7, "seed": 3},
    ],
)
@pytest.mark.parametrize("counts_ahead", [True, False])
def test_who_counts_tokens_runs_ahead(change: dict[str, Any], counts_ahead: bool) -> None:
    """Where the runner's worker counts what the step in flight samples; else it waits for it."""
    params = replace(PARAMS, **change)

    async def main() -> None:
        runner = FakeRunner(runs_ahead=True)
        runner.info = replace(runner.info, counts_ahead=counts_ahead)
        async with make_engine(runner) as engine:
            events = await collect(engine, [1, 2, 3], params)
            assert token_ids(events) == expected_tokens([1, 2, 3], params, eos_ids=[EOS_ID])
        assert bool(runner.num_ahead) == counts_ahead
        # The step that ends a text by itself may have one behind it.
        assert not counts_ahead or 0 <= runner.num_ahead - len(token_ids(events)) + 1 <= 1

    run(main())


def test_a_sequence_that_ends_costs_one_row() -> None:
    params = replace(PARAMS, ignore_eos=False, max_new_tokens=200)

    async def main() -> None:
        runner = FakeRunner(runs_ahead=True)
        async with make_engine(runner) as engine:
            for first in range(40):
                runner.num_computed_tokens = 0
                events = await collect(engine, [first, 7], params)
                await assert_nothing_leaked(engine)
                if events[-1].finish_reason is FinishReason.EOS:
                    assert events[-1].token_id == EOS_ID
                    assert runner.num_computed_tokens - len(token_ids(events)) <= 2
                    return
        pytest.fail("no sequence ended by itself")

    run(main())


def test_a_grammar_goes_on_behind_a_step_in_flight() -> None:
    """Its mask follows when the token is known; where the grammar has ended, the text does."""

    async def main(overlap: bool) -> tuple[list[list[TokenEvent]], int]:
        runner = FakeRunner(runs_ahead=True)
        async with make_engine(runner, overlap=overlap) as engine:
            found = [await collect(engine, [1, 2], replace(PARAMS, grammar=g)) for g in GRAMMARS]
            await assert_nothing_leaked(engine)
        return found, runner.num_ahead

    (plain, none_ahead), (ahead, num_ahead) = run(main(False)), run(main(True))
    assert not none_ahead
    assert [summary(events) for events in ahead] == [summary(events) for events in plain]
    # All but each text's first, and one behind its last where nobody knew that it would be.
    assert num_ahead >= sum(len(token_ids(events)) - 1 for events in ahead)


@pytest.mark.parametrize("num_tokens", [1, 2, 7])
def test_who_leaves_under_a_grammar_holds_up_nobody(num_tokens: int) -> None:
    """The step behind waits for a mask that nobody fills any more."""

    async def main() -> None:
        runner = FakeRunner(runs_ahead=True, step_s=0.002)
        async with make_engine(runner) as engine:
            others = asyncio.create_task(collect(engine, [5, 6], PARAMS))
            for _ in range(5):
                params, num_left = replace(PARAMS, grammar=GRAMMARS[0]), num_tokens
                async for _ in engine.generate([1, 2], params):
                    num_left -= 1
                    if not num_left:
                        break
            assert token_ids(await others) == expected_tokens([5, 6], PARAMS)
            await assert_nothing_leaked(engine)

    run(main())


@pytest.mark.parametrize("failing", [0, 2, 3, 5])
def test_masks_behind_a_failed_step_are_waited_for_by_nobody(failing: int) -> None:
    async def main() -> None:
        runner = FakeRunner(runs_ahead=True)
        runner.fail_step = lambda number: "out of luck" if number == failing else ""
        async with make_engine(runner) as engine:
            with pytest.raises(EngineError, match="out of luck"):
                await collect(engine, [1, 2, 3], replace(PARAMS, grammar=GRAMMARS[0]))
            await assert_nothing_leaked(engine)
            events = await collect(engine, [1, 2, 3], PARAMS)
            assert token_ids(events) == expected_tokens([1, 2, 3], PARAMS)

    run(main())


@pytest.mark.parametrize("failing", [2, 3, 5])
def test_a_failed_step_takes_only_its_own_requests(failing: int) -> None:
    async def main() -> None:
        runner = FakeRunner(runs_ahead=True, max_num_seqs=2)
        runner.fail_step = lambda number: "out of luck" if number == failing else ""
        async with make_engine(runner) as engine:
            results = await asyncio.gather(
                *(collect(engine, [1, 2, 3], PARAMS) for _ in range(4)), return_exceptions=True
            )
            assert all(isinstance(result, EngineError) for result in results[:2])
            for result in results[2:]:
                assert not isinstance(result, BaseException)
                assert token_ids(result) == expected_tokens([1, 2, 3], PARAMS)
            assert engine.healthy
            assert engine.stats().totals.num_failed_steps == 1
            await assert_nothing_leaked(engine)

    run(main())


def test_a_step_that_cannot_be_submitted_ahead_is_submitted_later() -> None:
    class Refusing(FakeRunner):
        def submit_ahead(self, step: _native.Step, logit_rows: list[int]) -> None:
            raise RuntimeError("not now")

    async def main() -> None:
        async with make_engine(Refusing(runs_ahead=True)) as engine:
            events = await collect(engine, [1, 2, 3], PARAMS)
            assert token_ids(events) == expected_tokens([1, 2, 3], PARAMS)
            await assert_nothing_leaked(engine)

    run(main())


def test_abort_at_any_moment() -> None:
    async def main() -> None:
        runner = FakeRunner(step_s=0.0002, runs_ahead=True)
        async with make_engine(runner) as engine:
            for delay in range(40):
                other = asyncio.create_task(collect(engine, [1, 2, 3], PARAMS))
                task = asyncio.create_task(collect(engine, named("x")))
                for _ in range(delay):
                    await asyncio.sleep(0)
                engine.abort("x")
                await task
                assert token_ids(await other) == expected_tokens([1, 2, 3], PARAMS)
                await assert_nothing_leaked(engine)
            assert runner.num_ahead > 0

    run(main())


def named(name: str) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_token_ids=(9, 8), params=PARAMS)


def test_blocks_with_a_token_that_nobody_knows_are_not_published() -> None:
    """Aborted at every token: what is published then is what a later request finds and may use."""

    async def main() -> None:
        async with make_engine(FakeRunner(step_s=0.0002, runs_ahead=True)) as engine:
            prompt = list(range(13))
            expected = expected_tokens(prompt, replace(PARAMS, max_new_tokens=40))
            for count in range(1, 24):
                await take(engine, prompt, count)
                await assert_nothing_leaked(engine)
                events = await collect(engine, [*prompt, *expected[:30]], PARAMS)
                assert token_ids(events)[:10] == expected[30:]

    run(main())


async def take(engine: Engine, prompt: list[int], count: int) -> None:
    """Read some events of a request and leave it."""
    params = replace(PARAMS, max_new_tokens=60)
    iterator = engine.generate(prompt, params)
    for _ in range(count):
        await anext(iterator)
    await iterator.aclose()


@pytest.mark.parametrize("failing", range(2, 20))
def test_the_step_behind_a_failed_one_leaves_nothing(failing: int) -> None:
    """Its blocks are held until it has run, and it publishes none."""
    held: list[int] = []

    async def main() -> None:
        runner = FakeRunner(runs_ahead=True, block_size=4)
        runner.fails_late = True

        def fail(number: int) -> str:
            if number == failing + 1:
                time.sleep(0.01)  # for a loop that doesn't wait for this step
                held.append(runner.pool.num_used)
            return "out of luck" if number == failing else ""

        runner.fail_step = fail
        async with make_engine(runner) as engine:
            with pytest.raises(EngineError, match="out of luck"):
                await collect(engine, [1, 2, 3], PARAMS)
            await until(lambda: held)
            await assert_nothing_leaked(engine)
            num_computed = 3 + failing - 1  # the prompt in step 0, then a token each
            assert runner.pool.num_cached == num_computed // 4
            num_tokens = num_computed + 2  # with those of the failed step and the one behind
            assert held == [-(-num_tokens // 4)]

    run(main())


@pytest.mark.parametrize("failing", range(2, 14))
def test_nor_does_it_when_its_request_was_aborted_before(failing: int) -> None:
    """Its memory is freed neither by the abort nor by the failure of the first of two steps."""
    held: list[int] = []

    async def main() -> None:
        turns = asyncio.get_running_loop()
        runner = FakeRunner(runs_ahead=True, block_size=4)
        runner.fails_late = True
        was_aborted = threading.Event()

        def abort() -> None:
            assert engine._core is not None
            num_steps = engine.stats().totals.num_steps
            if num_steps < failing or len(engine._core._loop._in_flight) < 2:
                turns.call_soon(abort)  # until the step behind is submitted
                return
            engine.abort("it")
            was_aborted.set()

        def fail(number: int) -> str:
            if number == failing:
                turns.call_soon_threadsafe(abort)
                was_aborted.wait(10)
            if number == failing + 1:
                time.sleep(0.01)  # for a loop that doesn't wait for this step
                held.append(runner.pool.num_used)
            return "out of luck" if number == failing else ""

        runner.fail_step = fail
        async with make_engine(runner) as engine:
            request = GenerationRequest(request_id="it", prompt_token_ids=(1, 2, 3), params=PARAMS)
            events = [event async for event in engine.generate(request)]
            assert events[-1].finish_reason is FinishReason.ABORT
            await until(lambda: held)
            await assert_nothing_leaked(engine)
            assert held == [-(-(3 + failing + 1) // 4)]

    run(main())
