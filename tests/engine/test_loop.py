"""The loop's timing: overlap, a busy host, sleep when idle."""

from __future__ import annotations

import asyncio
import itertools
import os
import time

import pytest

from lmi_core import _native
from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.stats import RequestRecord, StepRecord
from tests.engine.fake_runner import FakeRunner
from tests.engine.harness import collect, make_engine, run, token_ids, until

PARAMS = SamplingParams(max_new_tokens=30, ignore_eos=True, temperature=1.0, seed=3)


class Recorder:
    """Notes everything that an observer is told."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.first_tokens_s: list[float] = []
        self.intervals_s: list[float] = []
        self.reasons: list[FinishReason | None] = []
        self.requests: list[RequestRecord] = []

    def on_step(self, step: StepRecord) -> None:
        self.steps.append(step)

    def on_first_token(self, seconds: float) -> None:
        self.first_tokens_s.append(seconds)

    def on_token_intervals(self, seconds: list[float]) -> None:
        self.intervals_s += seconds

    def on_request(self, record: RequestRecord) -> None:
        self.requests.append(record)

    def on_finish(self, reason: FinishReason | None) -> None:
        self.reasons.append(reason)


def test_overlapped_and_plain_loops_give_the_same_events() -> None:
    async def main(overlap: bool) -> list[list[tuple[int, str, object]]]:
        async with make_engine(FakeRunner(max_num_seqs=3), overlap=overlap) as engine:
            results = await asyncio.gather(
                *(collect(engine, [i, *range(3 * i)], PARAMS) for i in range(6))
            )
        return [[(e.token_id, e.text, e.finish_reason) for e in events] for events in results]

    assert run(main(False)) == run(main(True))


def test_a_held_loop_begins_no_steps_and_goes_on_with_the_same_tokens() -> None:
    async def main(overlap: bool) -> None:
        runner = FakeRunner()
        steps = 0
        submit = runner.submit

        def counted(step: _native.Step) -> None:
            nonlocal steps
            steps += 1
            submit(step)

        runner.submit = counted  # type: ignore[method-assign]
        async with make_engine(runner, overlap=overlap) as engine:
            undisturbed = token_ids(await collect(engine, [1, 2], PARAMS))
            events = engine.generate([1, 2], PARAMS)
            first = [await anext(events)]
            engine.hold(is_held=True)
            await asyncio.sleep(0.02)
            num_before = steps
            await asyncio.sleep(0.03)
            assert steps == num_before
            engine.hold(is_held=False)
            assert token_ids(first + [event async for event in events]) == undisturbed
            engine.hold(is_held=True)  # whoever stops doesn't wait for it
            last = asyncio.create_task(collect(engine, [3], PARAMS))
            await asyncio.sleep(0)
        assert len(await last) == 30

    run(main(overlap=False))
    run(main(overlap=True))


class InstantRunner(FakeRunner):
    """Completes a step while it is submitted, as a worker does whose step ends within a turn."""

    def submit(self, step: _native.Step) -> None:
        self.execute(step)
        os.eventfd_write(self.completion_fd, 1)


def test_a_step_starts_within_two_turns_of_a_busy_loop() -> None:
    """Short coroutines keep every turn of the loop busy; the next step starts in the second turn
    after one completed: the first sees the completion, the second acts."""
    turns = 0

    async def spin(stop: asyncio.Event) -> None:
        nonlocal turns
        while not stop.is_set():
            turns += 1
            await asyncio.sleep(0)

    async def main() -> None:
        runner = InstantRunner()
        submitted_turns: list[int] = []
        submit = runner.submit

        def noting_submit(step: _native.Step) -> None:
            submitted_turns.append(turns)
            submit(step)

        runner.submit = noting_submit  # type: ignore[method-assign]
        async with make_engine(runner) as engine:
            stop = asyncio.Event()
            spinner = asyncio.create_task(spin(stop))
            events = await collect(engine, [1, 2], PARAMS)
            stop.set()
            await spinner
        assert len(token_ids(events)) == 30
        # The first step starts before the spinner in its turn, the others after it.
        gaps = [b - a for a, b in itertools.pairwise(submitted_turns[1:])]
        assert max(gaps) <= 2, gaps

    run(main())


def test_an_idle_engine_sleeps() -> None:
    async def main() -> None:
        async with make_engine() as engine:
            await collect(engine, [1, 2], PARAMS)
            await asyncio.sleep(0.02)
            before = time.process_time()
            turns = engine.stats().totals.num_steps
            await asyncio.sleep(0.5)
            assert time.process_time() - before < 0.05
            assert engine.stats().totals.num_steps == turns

    run(main())


@pytest.mark.parametrize(
    "method", ["on_step", "on_first_token", "on_token_intervals", "on_request", "on_finish"]
)
def test_an_observer_that_fails_harms_nobody(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def fail(moment: object) -> None:
        calls.append(moment)
        raise ValueError("an observer's mistake")

    observer = Recorder()
    monkeypatch.setattr(observer, method, fail)

    async def main() -> None:
        async with make_engine(observer=observer) as engine:
            for _ in range(2):
                assert len(await collect(engine, [1, 2, 3], PARAMS)) == PARAMS.max_new_tokens
            assert engine.healthy

    run(main())
    assert calls
    assert "an observer failed" in caplog.text


def test_observers_and_totals_see_every_moment() -> None:
    observer = Recorder()

    async def main() -> None:
        async with make_engine(observer=observer) as engine:
            await collect(engine, [1, 2, 3], PARAMS)
            await collect(engine, [1, 2, 3], PARAMS)
            await until(lambda: len(observer.reasons) == 2)
            totals = engine.stats().totals
        assert observer.reasons == [FinishReason.LENGTH] * 2
        assert [record.num_generated_tokens for record in observer.requests] == [
            PARAMS.max_new_tokens
        ] * 2
        assert all(0 <= r.queue_seconds <= r.seconds for r in observer.requests)
        assert len(observer.first_tokens_s) == 2
        assert len(observer.intervals_s) == 58
        assert len(observer.steps) == totals.num_steps == 60
        assert sum(step.num_tokens for step in observer.steps) == 2 * (3 + 29)
        assert totals.num_requests == totals.num_finished_requests == 2
        assert totals.num_prompt_tokens == 6
        assert totals.num_generated_tokens == 60
        assert totals.step_seconds > 0

    run(main())
