"""Contrastive search is what its paper says, whatever else runs, and what it can't have it refuses.

Transformers has it no more: the oracle is written here from the definition.
"""

from __future__ import annotations

import asyncio
import functools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from lmi_core.engine.engine import Engine
from lmi_core.engine.handover import Handover
from lmi_core.engine.outputs import FinishReason, TokenEvent
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.stream import EventStream
from lmi_core.errors import UserError
from tests.checkpoints import cached_checkpoint
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
from tests.engine.test_invariance import config_of
from tests.models.test_parity import oracle_model
from tests.tiny_tokenizer import VOCAB_SIZE

SEARCH = SamplingParams(max_new_tokens=12, penalty_alpha=0.6, top_k=4, logprobs=2)
PROMPTS = [[5, 9, 200, 5], list(range(40, 73)), [17]]


@functools.cache
def expected(
    variant: str, prompt: tuple[int, ...], top_k: int, alpha: float, layer: int
) -> tuple[list[int], list[float]]:
    """12 tokens of (1 - alpha) p(v) - alpha max_j cos(h(v), h(x_j)), and log p of each."""
    model = oracle_model(variant, "float32", "float32")
    ids, logprobs = list(prompt), []

    def forward(rows: list[list[int]]) -> Any:
        return model(torch.tensor(rows), use_cache=False, output_hidden_states=True)

    with torch.no_grad():
        for _ in range(SEARCH.max_new_tokens or 0):
            behind = forward([ids])
            p, candidates = behind.logits[0, -1].double().softmax(-1).topk(top_k)
            context = behind.hidden_states[layer][0].double()
            texts = forward([[*ids, int(token)] for token in candidates])
            own = texts.hidden_states[layer][:, -1].double()
            cosines = torch.nn.functional.cosine_similarity(own[:, None], context[None], dim=-1)
            best = int(((1 - alpha) * p - alpha * cosines.max(dim=1).values).argmax())
            ids.append(int(candidates[best]))
            logprobs.append(float(p[best].log()))
            if ids[-1] == 1:
                break
    return ids[len(prompt) :], logprobs


@pytest.mark.parametrize(
    ("variant", "states", "more"),
    [
        ("llama3", "embedding", {}),
        ("llama3", "last_layer", {}),
        ("gpt2", "last_layer", {}),
        ("bloom", "embedding", {}),
        ("llama3", "embedding", {"device": "torch-cpu"}),
        ("gpt2", "last_layer", {"device": "torch-cpu"}),
        ("llama3", "last_layer", {"device": "torch-cpu", "deterministic": True}),
        ("llama3", "embedding", {"device": "torch-cpu", "tensor_parallel_degree": 2}),
    ],
)
def test_the_tokens_of_the_definition(variant: str, states: Any, more: dict[str, Any]) -> None:
    asked = [(PROMPTS[0], 4, 0.6), (PROMPTS[1], 7, 0.9), (PROMPTS[2], 2, 0.1)]

    async def main() -> list[list[TokenEvent]]:
        checkpoint = cached_checkpoint(variant, dtype="float32")
        config = config_of(checkpoint, "fp32", contrastive_states=states, **more)
        async with Engine(config, check_integrity=True) as engine:
            results = await asyncio.gather(
                *(
                    collect(engine, prompt, replace(SEARCH, top_k=top_k, penalty_alpha=alpha))
                    for prompt, top_k, alpha in asked
                )
            )
            await assert_nothing_leaked(engine)
            assert engine.stats().totals.num_cached_tokens == 0
        return results

    layer = 0 if states == "embedding" else -1
    for (prompt, top_k, alpha), events in zip(asked, asyncio.run(main()), strict=True):
        ids, logprobs = expected(variant, tuple(prompt), top_k, alpha, layer)
        assert token_ids(events) == ids
        assert [event.logprob for event in events] == pytest.approx(logprobs, abs=2e-4)
        assert all(len(event.top) == 2 for event in events)


def test_its_own_extremes() -> None:
    """Without a penalty, and of one candidate, it is greedy; a penalty changes the text."""

    async def main() -> None:
        config = config_of(cached_checkpoint("llama3", dtype="float32"), "fp32")
        async with Engine(config) as engine:
            greedy = token_ids(await collect(engine, PROMPTS[0], max_new_tokens=12))
            texts = [
                token_ids(await collect(engine, PROMPTS[0], replace(SEARCH, **changes)))
                for changes in ({"penalty_alpha": 0}, {"top_k": 1}, {})
            ]
            assert texts[0] == texts[1] == greedy != texts[2]

    asyncio.run(main())


def searches(seed: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    asked = []
    for i in range(12):
        prompt = [rng.randrange(200) for _ in range(rng.choice([1, 5, 16, 40, 70]))]
        params = SamplingParams(max_new_tokens=rng.choice([1, 2, 9, 50]), logprobs=0)
        if i % 4 == 1:
            params = replace(params, num_beams=rng.choice([2, 3]))
        elif i % 4:
            alpha, top_k = rng.choice([0.1, 0.6, 1.0]), rng.choice([1, 2, 3, 4])
            params = replace(params, penalty_alpha=alpha, top_k=top_k)
            params = replace(params, min_new_tokens=rng.choice([0, 1]))
        asked.append((prompt, params))
    long = SamplingParams(max_new_tokens=100, ignore_eos=True, logprobs=0)
    return [*asked, *(([i], long) for i in range(6))]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "capacities",
    [
        {},
        {"num_blocks": 128, "block_size": 4, "max_num_seqs": 16},
        {"max_num_seqs": 4},
        {"max_num_batched_tokens": 8},
        {"guaranteed_no_evict": True, "num_blocks": 60},
        {"speculation": True},
    ],
)
def test_the_same_text_whatever_else_runs(seed: int, capacities: dict[str, Any]) -> None:
    """Alone, and beside others that are aborted, with preemption, in chunks, with drafts."""
    sizes = {k: v for k, v in capacities.items() if k.startswith(("num_", "max_", "block_"))}
    options = {k: v for k, v in capacities.items() if k not in sizes}
    if options.get("speculation"):
        from tests.engine.random_drafts import SPECULATION

        options["speculation"] = SPECULATION

    async def together() -> tuple[list[Any], int]:
        runner = FakeRunner(max_logprobs=20, runs_ahead=True, **sizes)
        async with make_engine(runner, **options) as engine:
            aborted = asyncio.create_task(abort_some(engine, seed))
            results = await asyncio.gather(*(collect(engine, *one) for one in searches(seed)))
            await aborted
            await assert_nothing_leaked(engine)
            return [summary(events) for events in results], engine._core._scheduler.num_preemptions

    async def alone() -> list[Any]:
        async with make_engine(FakeRunner(max_logprobs=20), overlap=False) as engine:
            return [summary(await collect(engine, *one)) for one in searches(seed)]

    got, num_preemptions = run(together())
    assert got == run(alone())
    if sizes.get("block_size") == 4:
        assert num_preemptions > 0


async def abort_some(engine: Engine, seed: int) -> None:
    rng = random.Random(seed + 100)
    for i in range(6):
        params = replace(SEARCH, max_new_tokens=50, top_k=rng.choice([1, 3]), ignore_eos=True)
        stream = engine.generate([rng.randrange(200) for _ in range(20)], params)
        for _ in range(i):
            await anext(stream)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        await stream.aclose()


def summary(events: list[TokenEvent]) -> list[tuple[Any, ...]]:
    return [(e.choice, e.num_generated_tokens, e.token_id, e.logprob, e.score) for e in events]


def test_what_ends_it_and_what_is_banned() -> None:
    async def main() -> None:
        async with make_engine(FakeRunner(max_logprobs=20)) as engine:
            long = replace(SEARCH, max_new_tokens=40, ignore_eos=True)
            events = await collect(engine, [1, 2, 3], long)
            ids, written = token_ids(events), text(events)
            assert events[-1].finish_reason is FinishReason.LENGTH
            stopped = await collect(engine, [1, 2, 3], replace(long, stop=(written[7:9],)))
            assert written.startswith(text(stopped))
            assert len(text(stopped)) <= 7
            assert stopped[-1].finish_reason is FinishReason.STOP
            ended = await collect(engine, [1, 2, 3], replace(long, stop_token_ids=(ids[5],)))
            assert token_ids(ended) == ids[: ids.index(ids[5]) + 1]
            assert ended[-1].finish_reason is FinishReason.STOP
            once = replace(long, no_repeat_ngram_size=1)
            events = await collect(engine, [1, 2, 3], replace(once, max_new_tokens=12))
            assert len({1, 2, 3, *token_ids(events)}) == 15
            with pytest.raises(UserError, match="bans leave 3, but 4 are compared"):
                await collect(engine, [1, 2, 3], once)  # there are 20 tokens to choose from
            await assert_nothing_leaked(engine)

    run(main())


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"penalty_alpha": 1.5}, "penalty_alpha", "between 0 and 1, got 1.5"),
        ({"penalty_alpha": float("nan")}, "penalty_alpha", "between 0 and 1, got nan"),
        ({"top_k": 0}, "top_k", "between 1 and 128, got 0"),
        ({"top_k": 9}, "top_k", "8 sequences in a step; lower top_k"),
        ({"top_k": 6}, "top_k", "the 6 likeliest tokens have .*max_logprobs is 5"),
        ({"max_new_tokens": 250}, "top_k", "take 65 blocks of the cache, which has 60"),
        ({"num_beams": 2}, "num_beams", "contrastive search has no num_beams"),
        ({"n": 2}, "n", "contrastive search has no n:"),
        ({"temperature": 1.0}, "temperature", "contrastive search has no temperature"),
        ({"repetition_penalty": 1.1}, "repetition_penalty", "has no repetition_penalty"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "has no prompt_logprobs"),
    ],
)
def test_refusals(changes: dict[str, Any], field: str, words: str) -> None:
    async def main() -> None:
        async with make_engine(FakeRunner(num_blocks=60)) as engine:
            with pytest.raises(UserError, match=words) as raised:
                await collect(engine, [1, 2, 3], replace(SEARCH, **changes))
            assert raised.value.field == field
            assert not engine.stats().totals.num_steps

    run(main())


def test_hidden_states_need_a_runner_that_gives_them() -> None:
    async def main() -> None:
        runner = FakeRunner()
        runner.info = replace(runner.info, num_state_columns=0, kernels="Transformers")
        async with make_engine(runner) as engine:
            with pytest.raises(UserError, match="the model runs on Transformers") as raised:
                await collect(engine, [1, 2, 3], SEARCH)
            assert raised.value.field == "penalty_alpha"
        runner = FakeRunner()
        runner.info = replace(runner.info, num_state_columns=1 << 20)
        async with make_engine(runner) as engine:
            with pytest.raises(UserError, match=r"of which it may keep 64; .* are 100") as raised:
                await collect(engine, [1] * 88, SEARCH)
            assert raised.value.field == "max_new_tokens"

    run(main())


def test_hidden_states_are_counted_in_blocks() -> None:
    """256 states of 32 bytes, rounded up, take a block of 16 tokens with 1 KiB each."""

    async def main() -> None:
        async with make_engine(FakeRunner(step_s=0.002)) as engine:
            stream = engine.generate([1, 2, 3], replace(SEARCH, top_k=1, ignore_eos=True))
            await anext(stream)
            assert engine.stats().num_used_blocks == 1 + 1
            await stream.aclose()
            await assert_nothing_leaked(engine)

    run(main())


def test_an_abort_and_a_failed_step_end_it_alone() -> None:
    async def main() -> None:
        runner = FakeRunner(step_s=0.002)
        async with make_engine(runner) as engine:
            long = replace(SEARCH, max_new_tokens=200, ignore_eos=True)
            task = asyncio.create_task(collect(engine, [1, 2, 3], long, request_id="x"))
            await until(lambda: engine.stats().totals.num_steps > 4)
            engine.abort("x")
            events = await task
            assert events[-1].finish_reason is FinishReason.ABORT
            number = engine.stats().totals.num_steps
            runner.fail_step = lambda n: "broken" if n == number + 3 else ""
            with pytest.raises(Exception, match="broken"):
                await collect(engine, [1, 2, 3], long)
            await assert_nothing_leaked(engine)
            assert len(await collect(engine, [1, 2, 3], replace(long, max_new_tokens=4))) == 4

    run(main())


def test_another_engine_goes_on_with_it() -> None:
    params = replace(SEARCH, max_new_tokens=9, ignore_eos=True, logprobs=0)

    async def main() -> None:
        async with make_engine() as engine:
            whole = await collect(engine, [1, 2, 3], params)
            for num_given in (1, 5):
                stream = EventStream(lambda: None)
                request = GenerationRequest(
                    request_id="again", prompt_token_ids=(1, 2, 3), params=params
                )
                given = tuple(token_ids(whole)[:num_given])
                handover = Handover(order=9, arrival_s=0.0, outputs=(given,))
                await engine._usable_core().open(request, stream, handover)
                await until(lambda: stream._is_finished)  # noqa: B023
                assert summary(stream.take()[0]) == summary(whole)[num_given:]
            await assert_nothing_leaked(engine)

    run(main())


def test_the_vocabulary_bounds_the_candidates() -> None:
    async def main() -> None:
        checkpoint = cached_checkpoint("llama3", dtype="float32")
        config = config_of(checkpoint, "fp32", max_logprobs=VOCAB_SIZE, max_num_seqs=128)
        async with Engine(config) as engine:
            allowed = set(range(100, 107))
            banned = tuple(i for i in range(VOCAB_SIZE) if i not in allowed)
            params = replace(SEARCH, top_k=9, banned_token_ids=banned)
            assert set(token_ids(await collect(engine, PROMPTS[0], params))) <= allowed

    asyncio.run(main())
