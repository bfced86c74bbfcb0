"""Beam search is that of Transformers, whatever else runs, and what it can't have it refuses."""

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
from lmi_core.structured.grammar import Grammar
from tests.checkpoints import cached_checkpoint
from tests.engine.fake_runner import FakeRunner
from tests.engine.harness import (
    assert_nothing_leaked,
    collect,
    make_engine,
    run,
    token_ids,
    until,
)
from tests.engine.test_invariance import config_of
from tests.models.test_parity import oracle_model
from tests.tiny_tokenizer import VOCAB_SIZE

BEAMS = SamplingParams(max_new_tokens=12, num_beams=4, n=4, logprobs=0)
PROMPTS = [[5, 9, 200], list(range(40, 73)), [17]]

CASES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "two": {"num_beams": 2, "n": 1},
    "long ones": {"length_penalty": 2.0},
    "short ones": {"length_penalty": -1.0},
    "early": {"early_stopping": True},
    "never early": {"early_stopping": "never"},
    "never early, short ones": {"early_stopping": "never", "length_penalty": -0.5},
    "many ends": {"stop_token_ids": tuple(range(2, VOCAB_SIZE, 40))},
    "many ends, early": {
        "stop_token_ids": tuple(range(2, VOCAB_SIZE, 40)),
        "early_stopping": True,
        "length_penalty": 0.0,
    },
    "ends, not at once": {"stop_token_ids": (7, 30, 99, 210), "min_new_tokens": 6},
    "one token": {"max_new_tokens": 1},
    "bans": {"no_repeat_ngram_size": 2, "bad_words_ids": ((5,), (9, 10), (12, 3))},
}


def choices(events: list[TokenEvent], count: int) -> list[tuple[list[int], float]]:
    last = {event.choice: event for event in events}
    return [(token_ids(events, i), last[i].score or 0.0) for i in range(count)]


@functools.cache
def oracle(variant: str) -> Any:
    return oracle_model(variant, "float32", "float32")


def expected(variant: str, prompt: list[int], params: SamplingParams) -> Any:
    """What ``generate`` of Transformers gives: ids and scores."""
    more: dict[str, Any] = {}
    if params.no_repeat_ngram_size:
        more["no_repeat_ngram_size"] = params.no_repeat_ngram_size
        more["bad_words_ids"] = [list(words) for words in params.bad_words_ids]
    end_ids = [1, *params.stop_token_ids]
    output = oracle(variant).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        num_beams=params.num_beams,
        num_return_sequences=params.n,
        max_new_tokens=params.max_new_tokens,
        min_new_tokens=params.min_new_tokens or None,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=end_ids,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **more,
    )
    texts = []
    for row in output.sequences[:, len(prompt) :].tolist():
        ends = [i for i, token_id in enumerate(row) if token_id in end_ids]
        texts.append(row[: ends[0] + 1] if ends else row)
    return list(zip(texts, output.sequences_scores.tolist(), strict=True))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("variant", ["llama3", "qwen3"])
def test_the_same_texts_and_scores_as_transformers(variant: str, case: str) -> None:
    params = replace(BEAMS, **CASES[case])

    async def main() -> list[list[TokenEvent]]:
        config = config_of(cached_checkpoint(variant, dtype="float32"), "fp32", max_logprobs=64)
        async with Engine(config, check_integrity=True) as engine:
            results = await asyncio.gather(*(collect(engine, p, params) for p in PROMPTS))
            await assert_nothing_leaked(engine)
        return results

    for prompt, events in zip(PROMPTS, asyncio.run(main()), strict=True):
        wanted = expected(variant, prompt, params)
        for (ids, score), (wanted_ids, wanted_score) in zip(
            choices(events, params.n), wanted, strict=True
        ):
            assert ids == wanted_ids
            assert score == pytest.approx(wanted_score, abs=2e-4)
        for i in range(params.n):
            logprobs = [event.logprob for event in events if event.choice == i]
            total = sum(logprob or 0.0 for logprob in logprobs)
            assert wanted[i][1] == pytest.approx(
                total / len(logprobs) ** params.length_penalty, abs=2e-4
            )


def test_what_the_events_say() -> None:
    async def main() -> list[TokenEvent]:
        config = config_of(cached_checkpoint("llama3", dtype="float32"), "fp32")
        async with Engine(config) as engine:
            return await collect(engine, PROMPTS[0], replace(BEAMS, n=2))

    events = asyncio.run(main())
    assert {event.choice for event in events} == {0, 1}
    for i in range(2):
        own = [event for event in events if event.choice == i]
        assert [event.num_generated_tokens for event in own] == list(range(1, len(own) + 1))
        assert [event.finish_reason for event in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish_reason in (FinishReason.LENGTH, FinishReason.EOS)
        assert [event.score for event in own[:-1]] == [None] * (len(own) - 1)


def searches(seed: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    asked = []
    for i in range(10):
        prompt = [rng.randrange(200) for _ in range(rng.choice([1, 5, 16, 40, 70]))]
        params = SamplingParams(max_new_tokens=rng.choice([1, 2, 9, 50]), logprobs=0)
        if i % 3:
            beams = rng.choice([2, 3, 4])
            params = replace(params, num_beams=beams, n=rng.randrange(1, beams + 1))
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
        {"enable_prefix_caching": False, "num_blocks": 128, "block_size": 4, "max_num_seqs": 16},
        {"guaranteed_no_evict": True, "num_blocks": 40},
        {"speculation": True},
    ],
)
def test_the_same_beams_whatever_else_runs(seed: int, capacities: dict[str, Any]) -> None:
    """Alone, and beside others that are aborted, with preemption, in chunks, with drafts."""
    sizes = {k: v for k, v in capacities.items() if k.startswith(("num_", "max_", "block_"))}
    options = {k: v for k, v in capacities.items() if k not in sizes}
    if options.get("speculation"):
        from tests.engine.random_drafts import SPECULATION

        options["speculation"] = SPECULATION

    async def together() -> tuple[list[Any], int]:
        async with make_engine(
            FakeRunner(max_logprobs=20, runs_ahead=True, **sizes), **options
        ) as engine:
            asked = searches(seed)
            aborted = asyncio.create_task(abort_some(engine, seed))
            results = await asyncio.gather(*(collect(engine, *one) for one in asked))
            await aborted
            await assert_nothing_leaked(engine)
            return [summary(events) for events in results], engine._core._scheduler.num_preemptions

    async def alone() -> list[Any]:
        results = []
        async with make_engine(FakeRunner(max_logprobs=20), overlap=False) as engine:
            for one in searches(seed):
                results.append(summary(await collect(engine, *one)))
        return results

    got, num_preemptions = run(together())
    assert got == run(alone())
    if sizes.get("block_size") == 4:
        assert num_preemptions > 0


async def abort_some(engine: Engine, seed: int) -> None:
    rng = random.Random(seed + 100)
    for i in range(6):
        params = SamplingParams(max_new_tokens=50, num_beams=rng.choice([1, 3]), ignore_eos=True)
        stream = engine.generate([rng.randrange(200) for _ in range(20)], params)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.002 * i)
        first.cancel()
        await asyncio.wait([first])
        await stream.aclose()


def summary(events: list[TokenEvent]) -> list[tuple[Any, ...]]:
    return sorted(
        (e.choice, e.num_generated_tokens, e.token_id, e.logprob, e.score) for e in events
    )


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"num_beams": 0}, "num_beams", "between 1 and 128, got 0"),
        ({"num_beams": 2, "n": 3}, "n", "n must be between 1 and 2, got 3"),
        ({"num_beams": 9}, "num_beams", "8 sequences in a step; lower num_beams"),
        ({"num_beams": 5}, "num_beams", "the 6 likeliest tokens have .*max_logprobs is 5"),
        ({"max_new_tokens": 250}, "num_beams", "take 64 blocks of the cache, which has 60"),
        ({"temperature": 1.0}, "temperature", "beam search has no temperature"),
        ({"stop": ("x",)}, "stop", "beam search has no stop"),
        ({"logprobs": 2}, "logprobs", "beam search has no logprobs"),
        (
            {"grammar": Grammar.regex("a+", field="guided_regex")},
            "guided_regex",
            "beam search has no guided_regex: leave",
        ),
        ({"length_penalty": 11.0}, "length_penalty", "between -10 and 10"),
        ({"early_stopping": "soon"}, "early_stopping", 'true, false or "never"'),
    ],
)
def test_refusals(changes: dict[str, Any], field: str, words: str) -> None:
    async def main() -> None:
        async with make_engine(FakeRunner(num_blocks=60)) as engine:
            params = SamplingParams(**{"max_new_tokens": 9, "num_beams": 4, **changes})
            with pytest.raises(UserError, match=words) as raised:
                await collect(engine, [1, 2, 3], params)
            assert raised.value.field == field
            assert not engine.stats().totals.num_steps

    run(main())


def test_bans_that_leave_too_little_to_compare_fail_alone() -> None:
    async def main() -> None:
        async with make_engine(FakeRunner(max_logprobs=6)) as engine:
            beams = SamplingParams(max_new_tokens=9, num_beams=3)
            other = asyncio.create_task(collect(engine, [1], beams))
            params = replace(beams, banned_token_ids=tuple(range(100)))
            with pytest.raises(UserError, match="bans leave 0, but 4 are compared"):
                await collect(engine, [1, 2, 3], params)
            assert token_ids(await other)
            await assert_nothing_leaked(engine)

    run(main())


def test_an_abort_ends_each_choice_once() -> None:
    async def main() -> None:
        async with make_engine(FakeRunner(step_s=0.005)) as engine:
            params = SamplingParams(max_new_tokens=200, num_beams=4, n=2, ignore_eos=True)
            task = asyncio.create_task(collect(engine, [1, 2, 3], params, request_id="x"))
            await until(lambda: engine.stats().totals.num_steps > 4)
            engine.abort("x")
            events = await task
            assert [(e.choice, e.finish_reason) for e in events] == [
                (0, FinishReason.ABORT),
                (1, FinishReason.ABORT),
            ]
            await assert_nothing_leaked(engine)

    run(main())


def test_a_failed_step_fails_the_search() -> None:
    async def main() -> None:
        runner = FakeRunner()
        runner.fail_step = lambda number: "broken" if number == 3 else ""
        async with make_engine(runner) as engine:
            with pytest.raises(Exception, match="broken"):
                await collect(engine, [1, 2, 3], SamplingParams(max_new_tokens=20, num_beams=3))
            await assert_nothing_leaked(engine)
            events = await collect(engine, [1, 2, 3], SamplingParams(max_new_tokens=4, num_beams=3))
            assert len(events) == 4

    run(main())


def test_a_search_that_another_engine_began_gives_the_rest() -> None:
    params = SamplingParams(max_new_tokens=8, num_beams=3, n=2, logprobs=0)

    async def main() -> None:
        async with make_engine() as engine:
            whole = await collect(engine, [1, 2, 3], params)
            texts = [tuple(token_ids(whole, i)) for i in range(2)]
            for num_given in (0, 2):
                stream = EventStream(lambda: None)
                request = GenerationRequest(
                    request_id="again", prompt_token_ids=(1, 2, 3), params=params
                )
                handover = Handover(
                    order=9,
                    arrival_s=0.0,
                    outputs=(texts[0], texts[1][:num_given]),
                    finished=frozenset({0}),
                )
                await engine._usable_core().open(request, stream, handover)
                await until(lambda: not engine.stats().num_running)
                await until(lambda: stream._is_finished)  # noqa: B023
                rest = stream.take()[0]
                assert token_ids(rest, 0) == []
                assert token_ids(rest, 1) == list(texts[1][num_given:])
                assert rest[-1].score == whole[-1].score
            await assert_nothing_leaked(engine)

    run(main())
