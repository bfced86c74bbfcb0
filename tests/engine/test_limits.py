"""What bounds requests: the context, the pool of blocks, the queue."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from lmi_core.engine import intake
from lmi_core.engine.engine import Engine
from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.stats import EngineObserver, StepRecord
from lmi_core.errors import CapacityError, UserError
from tests.engine.fake_runner import FakeRunner
from tests.engine.harness import (
    assert_nothing_leaked,
    collect,
    make_engine,
    run,
    token_ids,
    until,
)

PROMPT = list(range(40))


def test_context_end_is_a_length_finish() -> None:
    async def main() -> None:
        async with make_engine(FakeRunner(max_model_len=48)) as engine:
            assert engine.info.max_prompt_tokens == 47
            events = await collect(engine, PROMPT, SamplingParams(ignore_eos=True))
            assert len(events) == 8
            assert events[-1].finish_reason is FinishReason.LENGTH

    run(main())


def test_a_pool_smaller_than_the_context_bounds_requests() -> None:
    async def main() -> None:
        async with make_engine(FakeRunner(num_blocks=3, max_model_len=256)) as engine:
            events = await collect(engine, PROMPT, SamplingParams(ignore_eos=True, n=2))
            assert len(token_ids(events, 0)) == len(token_ids(events, 1)) == 8
            await assert_nothing_leaked(engine)

    run(main())


@pytest.mark.parametrize(("num_ranked", "most"), [(20, 16), (40, 8), (100, 3), (1000, 1)])
def test_many_ranked_tokens_take_the_place_of_a_prompts_rows(num_ranked: int, most: int) -> None:
    """Sixteen rows of a step with twenty each."""

    async def main() -> None:
        runner = FakeRunner(max_logprobs=1000, max_logit_rows=16, vocab_size=2000)
        watch = Sizes()
        async with make_engine(runner, observer=watch) as engine:
            params = SamplingParams(max_new_tokens=1, prompt_logprobs=num_ranked)
            events = await collect(engine, PROMPT, params)
            assert events[0].prompt is not None
            assert [len(token.top) for token in events[0].prompt[1:]] == [num_ranked] * 39
        assert max(watch.num_tokens) == most

    run(main())


class Sizes(EngineObserver):
    """Notes the tokens of each step."""

    def __init__(self) -> None:
        self.num_tokens: list[int] = []

    def on_step(self, step: StepRecord) -> None:
        self.num_tokens.append(step.num_tokens)


def test_queue_bound() -> None:
    async def main() -> None:
        runner = FakeRunner(max_num_seqs=2, step_s=0.002)
        async with make_engine(runner, max_queue_size=3) as engine:
            params = SamplingParams(max_new_tokens=20, ignore_eos=True)
            tasks = [asyncio.create_task(collect(engine, [i], params)) for i in range(5)]
            await until(lambda: engine.stats().num_running == 2)
            assert engine.stats().num_waiting == 3
            with pytest.raises(
                CapacityError, match=r"^3 requests are waiting, at most 3 may"
            ) as caught:
                await collect(engine, [9], params)
            assert caught.value.retry_after_s is not None
            assert [len(events) for events in await asyncio.gather(*tasks)] == [20] * 5

    run(main())


def test_the_queue_counts_choices() -> None:
    async def main() -> None:
        runner = FakeRunner(max_num_seqs=2, step_s=0.002)
        async with make_engine(runner, max_queue_size=4) as engine:
            params = SamplingParams(max_new_tokens=20, ignore_eos=True)
            # More than may wait, but nobody waits.
            first = asyncio.create_task(collect(engine, [1], replace(params, n=5)))
            await until(lambda: engine.stats().num_running == 2)
            with pytest.raises(CapacityError, match=r"^3 requests .*each of their choices counts"):
                await collect(engine, [2], replace(params, n=2))
            second = asyncio.create_task(collect(engine, [2], params))
            await asyncio.sleep(0)
            with pytest.raises(CapacityError, match="4 requests are waiting"):
                await collect(engine, [3], params)
            assert [len(events) for events in await asyncio.gather(first, second)] == [100, 20]
            # Choices that never ran are forgotten, too.
            for _ in range(3):
                await collect(engine, [4], replace(params, n=6, max_new_tokens=1))
            await assert_nothing_leaked(engine)

    run(main())


def test_prompts_of_all_choices_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "_MAX_PROMPT_TOKENS", 20)

    async def main() -> None:
        async with make_engine(FakeRunner(step_s=0.002)) as engine:
            params = SamplingParams(max_new_tokens=20, ignore_eos=True)
            with pytest.raises(UserError, match="n is 7, of a prompt of 3 tokens; together"):
                await collect(engine, [1, 2, 3], replace(params, n=7))
            first = asyncio.create_task(collect(engine, [1, 2, 3], replace(params, n=6)))
            await until(lambda: engine.stats().num_running == 6)
            with pytest.raises(CapacityError, match="have 18 tokens, and with 3 more over 20"):
                await collect(engine, [1, 2, 3], params)
            await first
            await collect(engine, [1] * 20, replace(params, max_new_tokens=2))

    run(main())


def test_priorities_order_the_queue() -> None:
    order: list[str] = []

    async def one(engine: Engine, name: str, priority: int) -> None:
        request = GenerationRequest(
            request_id=name,
            prompt_token_ids=(1, 2),
            params=SamplingParams(max_new_tokens=3, ignore_eos=True),
            priority=priority,
        )
        await collect(engine, request)
        order.append(name)

    async def main() -> None:
        async with make_engine(FakeRunner(max_num_seqs=1, step_s=0.002)) as engine:
            first = asyncio.create_task(one(engine, "first", 0))
            await until(lambda: engine.stats().num_running == 1)
            others = [
                one(engine, name, priority)
                for name, priority in [("low", 3), ("high", 1), ("high too", 1)]
            ]
            await asyncio.gather(first, *others)

    run(main())
    assert order == ["first", "high", "high too", "low"]
