"""What happens when steps fail, requests vanish, and readers are slow."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from lmi_core.engine.delivery import Delivery
from lmi_core.engine.logits_processors import LogitsProcessors
from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import EngineError, UserError
from lmi_core.structured.grammar import Grammar
from lmi_core.structured.mask_threads import MissingMask
from tests.engine.fake_runner import FakeRunner
from tests.engine.harness import (
    assert_nothing_leaked,
    collect,
    make_engine,
    run,
    text,
    token_ids,
    until,
)
from tests.engine.oracle import expected_tokens

PARAMS = SamplingParams(max_new_tokens=20, ignore_eos=True)


def request(name: str, params: SamplingParams = PARAMS) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_token_ids=(1, 2, 3), params=params)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_step_takes_only_its_own_requests(overlap: bool) -> None:
    async def main() -> None:
        runner = FakeRunner(max_num_seqs=2)
        runner.fail_step = lambda number: "out of luck" if number == 5 else ""
        async with make_engine(runner, overlap=overlap) as engine:
            results = await asyncio.gather(
                *(collect(engine, request(str(i))) for i in range(4)), return_exceptions=True
            )
            failed = [result for result in results if isinstance(result, EngineError)]
            assert len(failed) == 2
            assert "out of luck" in str(failed[0])
            for result in results[2:]:
                assert not isinstance(result, BaseException)
                assert token_ids(result) == expected_tokens([1, 2, 3], PARAMS)
            assert engine.healthy
            assert engine.stats().totals.num_failed_steps == 1
            await assert_nothing_leaked(engine)

    run(main())


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_step_that_failed_before_its_masks_were_there(
    runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come when its buffer is another's, whose masks they must not touch."""
    pytest.importorskip("llguidance")
    compute, num_masks = MissingMask.compute, itertools.count()

    def slow(mask: MissingMask) -> Any:
        if next(num_masks) == 0:
            time.sleep(0.5)
        return compute(mask)

    monkeypatch.setattr(MissingMask, "compute", slow)
    params = replace(PARAMS, grammar=Grammar.regex("[a-c]{20}"))

    async def main() -> None:
        runner = FakeRunner(runs_ahead=runs_ahead)
        runner.fail_step = lambda number: "broken" if number == 0 else ""
        async with make_engine(runner) as engine:
            with pytest.raises(EngineError, match="broken"):
                await collect(engine, request("0", params))
            for _ in range(len(runner.steps) - 1):
                await collect(engine, request("1", replace(PARAMS, max_new_tokens=1)))
            events = await collect(engine, request("2", params))
            assert set(text(events)) <= set("abc")
            assert len(token_ids(events)) == 20
            await assert_nothing_leaked(engine)

    run(main(), 30)


def test_a_failed_step_publishes_nothing() -> None:
    prompt = list(range(48))

    async def main() -> None:
        runner = FakeRunner()
        runner.fail_step = lambda number: "broken" if number == 0 else ""
        async with make_engine(runner) as engine:
            with pytest.raises(EngineError, match="broken"):
                await collect(engine, prompt, PARAMS)
            events = await collect(engine, prompt, PARAMS)
            assert events[0].num_cached_tokens == 0
            assert token_ids(events) == expected_tokens(prompt, PARAMS)

    run(main())


def test_two_failures_in_a_row_make_it_unhealthy() -> None:
    async def main() -> None:
        runner = FakeRunner()
        runner.fail_step = lambda number: "broken" if number in (0, 2, 3) else ""
        async with make_engine(runner) as engine:
            one = SamplingParams(max_new_tokens=1, ignore_eos=True)
            with pytest.raises(EngineError):
                await collect(engine, request("0", one))
            await collect(engine, request("1", one))
            assert engine.healthy
            for name in "23":
                with pytest.raises(EngineError, match="broken"):
                    await collect(engine, request(name, one))
            assert not engine.healthy
            with pytest.raises(EngineError, match="unhealthy"):
                await collect(engine, request("4", one))
            await assert_nothing_leaked(engine)

    run(main())


def test_a_runner_that_refuses_a_step_fails_it() -> None:
    async def main() -> None:
        runner = FakeRunner()
        submit = runner.submit

        def refuse(step: object) -> None:
            runner.submit = submit  # type: ignore[method-assign]
            raise RuntimeError("no worker")

        runner.submit = refuse  # type: ignore[method-assign]
        async with make_engine(runner) as engine:
            with pytest.raises(EngineError, match="no worker"):
                await collect(engine, request("0"))
            assert len(await collect(engine, request("1"))) == 20

    run(main())


def test_no_possible_token_fails_that_request() -> None:
    async def main() -> None:
        runner = FakeRunner()
        execute = runner.execute

        def without_first_row(step, token_ids):  # type: ignore[no-untyped-def]
            execute(step, token_ids)
            if step.num_seqs == 2:
                step.set_result(0, -1, 0.0)

        runner.execute = without_first_row  # type: ignore[method-assign]
        async with make_engine(runner) as engine:
            results = await asyncio.gather(
                collect(engine, request("0")), collect(engine, request("1")), return_exceptions=True
            )
            assert isinstance(results[0], EngineError)
            assert "no token could be sampled" in str(results[0])
            assert not isinstance(results[1], BaseException)
            assert len(results[1]) == 20
            await assert_nothing_leaked(engine)

    run(main())


def test_an_end_that_is_forced_is_no_ban_of_the_requests() -> None:
    """Of so many tokens at least the last one is free to be it, as the sampling table has it."""

    async def main() -> None:
        runner, num_steps = FakeRunner(), itertools.count(1)
        execute = runner.execute

        def without_last(step, token_ids):  # type: ignore[no-untyped-def]
            execute(step, token_ids)
            if next(num_steps) == 6:
                step.set_result(0, -1, 0.0)

        runner.execute = without_last  # type: ignore[method-assign]
        forced = LogitsProcessors(forced_eos_token_id=(3,))
        lengths = {"max_new_tokens": 6, "min_new_tokens": 6, "stop_token_ids": (3,)}
        async with make_engine(runner) as engine:
            params = SamplingParams(processors=forced, **lengths)
            with pytest.raises(EngineError, match="logits aren't finite"):
                await collect(engine, request("0", params))

    run(main())


def test_a_fault_in_delivery_ends_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    token_event = Delivery._token_event

    def broken(self, sequence, token_id, num_generated, reason):  # type: ignore[no-untyped-def]
        if sequence.request.request_id == "0" and num_generated == 3:
            raise ValueError("cannot show this")
        return token_event(self, sequence, token_id, num_generated, reason)

    monkeypatch.setattr(Delivery, "_token_event", broken)

    async def main() -> None:
        async with make_engine() as engine:
            results = await asyncio.gather(
                collect(engine, request("0")), collect(engine, request("1")), return_exceptions=True
            )
            assert isinstance(results[0], EngineError)
            assert not isinstance(results[1], BaseException)
            assert len(results[1]) == 20
            await assert_nothing_leaked(engine)

    run(main())


def test_a_fault_in_the_loop_fails_everything_loudly() -> None:
    async def main() -> None:
        runner = FakeRunner(max_num_seqs=1)
        async with make_engine(runner) as engine:
            tasks = [asyncio.create_task(collect(engine, request(name))) for name in "ab"]
            await until(lambda: engine.stats().num_running == 1)
            runner.block_tables = None  # type: ignore[assignment]
            core = engine._core
            assert core is not None
            core._scheduler.plan = None  # type: ignore[method-assign, assignment]
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(result, EngineError)
            assert not engine.healthy

    run(main())


class Faulty:
    """Passes calls on to a part of the engine; the named ones fail when their turn comes."""

    def __init__(self, part: Any, turns: dict[str, set[int]]) -> None:
        self._part = part
        self._turns = turns
        self._calls: Counter[str] = Counter()
        self.num_faults = 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._part, name)
        if name not in self._turns:
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            turn = self._calls[name]
            self._calls[name] += 1
            if turn in self._turns[name]:
                self.num_faults += 1
                raise MemoryError(f"{name} is out of luck")
            return value(*args, **kwargs)

        return call


MEMORY_CALLS = [
    ("pool", "allocate"),
    ("pool", "acquire_prefix"),
    ("pool", "add_ref"),
    ("pool", "publish"),
    ("block_tables", "set"),
    ("block_tables", "append"),
    ("sampling", "set"),
    ("sampling", "observe_prompt"),
    ("sampling", "observe_many"),
    ("sampling", "observe"),
]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("part", "call"), MEMORY_CALLS)
def test_a_fault_around_a_step_fails_its_own_request(part: str, call: str, overlap: bool) -> None:
    """Admission, growth and commit may raise; one request ends, the others get their tokens."""
    params = SamplingParams(
        max_new_tokens=40, ignore_eos=True, temperature=1.0, seed=3, repetition_penalty=1.5, n=2
    )
    prompt = list(range(20))

    async def main() -> None:
        runner = FakeRunner(max_num_seqs=6, num_blocks=24)
        faulty = Faulty(getattr(runner, part), {call: {3}})
        setattr(runner, part, faulty)
        async with make_engine(runner, overlap=overlap) as engine:
            results = await asyncio.gather(
                *(collect(engine, prompt, params) for _ in range(6)), return_exceptions=True
            )
            assert faulty.num_faults == 1
            failed = [result for result in results if isinstance(result, BaseException)]
            assert len(failed) == 1
            assert isinstance(failed[0], EngineError)
            assert f"{call} is out of luck" in str(failed[0])
            for result in results:
                if not isinstance(result, BaseException):
                    for choice in (0, 1):
                        expected = expected_tokens(prompt, params, seed=3, choice=choice)
                        assert token_ids(result, choice) == expected
            assert engine.healthy
            assert len(await collect(engine, request("after"))) == 20
            await assert_nothing_leaked(engine)

    run(main())


@pytest.mark.parametrize("overlap", [False, True])
def test_abort_at_any_moment(overlap: bool) -> None:
    # More tokens than there are turns of the loop before the last abort.
    params = SamplingParams(max_new_tokens=60, ignore_eos=True, n=2, temperature=1.0)

    async def main() -> None:
        runner = FakeRunner(step_s=0.0002, max_num_batched_tokens=8)
        async with make_engine(runner, overlap=overlap) as engine:
            for delay in range(40):
                other = asyncio.create_task(collect(engine, request(f"other-{delay}")))
                task = asyncio.create_task(collect(engine, request("x", params)))
                for _ in range(delay):
                    await asyncio.sleep(0)
                engine.abort("x")
                engine.abort("x")
                if delay > 2:
                    events = await task
                    assert {event.finish_reason for event in events[-2:]} == {FinishReason.ABORT}
                else:  # not yet submitted: nothing to abort
                    await task
                engine.abort("x")
                assert token_ids(await other) == expected_tokens([1, 2, 3], PARAMS)
            await assert_nothing_leaked(engine)

    run(main())


def test_closing_the_iterator_and_cancelling_the_task_abort() -> None:
    async def main() -> None:
        async with make_engine(FakeRunner(step_s=0.001)) as engine:
            forever = SamplingParams(ignore_eos=True)
            iterator = engine.generate([1], forever)
            await anext(iterator)
            await iterator.aclose()
            await assert_nothing_leaked(engine)

            task = asyncio.create_task(collect(engine, [1], forever))
            await until(lambda: engine.stats().num_running == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await assert_nothing_leaked(engine)

            async for _ in engine.generate([1], forever):
                break
            await assert_nothing_leaked(engine)

    run(main())


def test_a_request_id_in_use_is_refused_and_the_first_goes_on() -> None:
    async def main() -> None:
        async with make_engine(FakeRunner(step_s=0.001)) as engine:
            first = asyncio.create_task(collect(engine, request("same")))
            await until(lambda: engine.stats().num_running == 1)
            with pytest.raises(UserError, match="in use"):
                await collect(engine, request("same"))
            assert len(await first) == 20

    run(main())


def test_a_slow_reader_gets_merged_lists_and_holds_nobody_up() -> None:
    async def main() -> None:
        async with make_engine() as engine:
            batches = engine.generate_batches(request("slow"))
            first = await anext(batches)
            assert len(await collect(engine, request("quick"))) == 20
            await assert_nothing_leaked(engine)
            rest = [events async for events in batches]
            assert len(rest) == 1
            assert token_ids(first + rest[0]) == expected_tokens([1, 2, 3], PARAMS)
            assert text(first + rest[0])

    run(main())


def test_a_reader_that_is_behind_gets_the_events_and_then_the_error() -> None:
    async def main() -> None:
        runner = FakeRunner()
        runner.fail_step = lambda number: "out of luck" if number == 5 else ""
        async with make_engine(runner) as engine:
            batches = engine.generate_batches(request("slow"))
            first = await anext(batches)
            await until(lambda: engine.stats().totals.num_failed_steps == 1)
            rest = await anext(batches)
            assert len(first + rest) == 5
            with pytest.raises(EngineError, match="out of luck"):
                await anext(batches)

    run(main())
