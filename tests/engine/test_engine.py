"""The engine end to end over the fake runner: tokens, text, log-probabilities."""

from __future__ import annotations

import asyncio
import gc
import pickle
from array import array
from dataclasses import replace
from typing import Any

import pytest

from lmi_core.engine import delivery
from lmi_core.engine.outputs import (
    FinishReason,
    PromptToken,
    PromptTokens,
    TokenEvent,
    TokenLogprob,
)
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from tests.engine.fake_runner import FakeRunner, logprob_of
from tests.engine.harness import (
    EOS_ID,
    assert_nothing_leaked,
    byte_tokenizer,
    collect,
    make_engine,
    run,
    text,
    token_ids,
)
from tests.engine.oracle import expected_tokens

PROMPT = list(range(40))


@pytest.mark.parametrize("overlap", [False, True])
def test_generates_what_the_model_says(overlap: bool) -> None:
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)

    async def main() -> None:
        async with make_engine(overlap=overlap) as engine:
            events = await collect(engine, PROMPT, params)
            await assert_nothing_leaked(engine)
        assert token_ids(events) == expected_tokens(PROMPT, params)
        assert [event.num_generated_tokens for event in events] == list(range(1, 31))
        assert [event.finish_reason for event in events[:-1]] == [None] * 29
        assert events[-1].finish_reason is FinishReason.LENGTH
        decoded = byte_tokenizer().decode(token_ids(events))
        assert text(events) == decoded

    run(main())


def test_many_requests_share_the_batch() -> None:
    prompts = [list(range(i, i + 5 + 7 * i)) for i in range(12)]
    params = [SamplingParams(max_new_tokens=5 + i, temperature=1.0, seed=i) for i in range(12)]

    async def main() -> None:
        async with make_engine() as engine:
            results = await asyncio.gather(
                *(collect(engine, p, s) for p, s in zip(prompts, params, strict=True))
            )
            await assert_nothing_leaked(engine)
            assert engine.stats().totals.num_steps < sum(s.max_new_tokens or 0 for s in params)
        for prompt, param, events in zip(prompts, params, results, strict=True):
            expected = expected_tokens(prompt, param, eos_ids=[EOS_ID], max_total_tokens=256)
            assert token_ids(events) == expected

    run(main())


def test_ends_at_eos_and_at_stop_ids() -> None:
    free = expected_tokens(PROMPT, SamplingParams(max_new_tokens=50))

    async def main() -> None:
        async with make_engine(eos_ids=(free[9],)) as engine:
            by_eos = await collect(engine, PROMPT, SamplingParams(max_new_tokens=50))
            by_id = await collect(
                engine, PROMPT, SamplingParams(max_new_tokens=50, stop_token_ids=(free[4],))
            )
            late = await collect(
                engine, PROMPT, SamplingParams(max_new_tokens=50, min_new_tokens=20)
            )
        assert token_ids(by_eos) == free[: free.index(free[9]) + 1]
        assert by_eos[-1].finish_reason is FinishReason.EOS
        assert by_eos[-1].stop is None
        assert by_id[-1].finish_reason is FinishReason.STOP
        assert by_id[-1].stop == free[4]
        assert by_id[-1].text == ""
        assert len(late) >= 20

    run(main())


def test_stop_string_ends_the_text_before_it() -> None:
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    full = byte_tokenizer().decode(expected_tokens(PROMPT, params))
    stop = full[20:23]

    async def main(overlap: bool, include_stop: bool) -> None:
        runner = FakeRunner()
        async with make_engine(runner, overlap=overlap) as engine:
            events = await collect(
                engine,
                PROMPT,
                SamplingParams(
                    max_new_tokens=60, ignore_eos=True, stop=(stop,), include_stop=include_stop
                ),
            )
            assert engine.stats().num_waiting == 0
            await assert_nothing_leaked(engine)
            # Found while the next step ran, so it cost at most one row more.
            num_tokens = len(PROMPT) + len(token_ids(events))
            assert num_tokens - 1 <= runner.num_computed_tokens <= num_tokens - 1 + overlap
        end = full.index(stop) + (len(stop) if include_stop else 0)
        assert text(events) == full[:end]
        assert events[-1].finish_reason is FinishReason.STOP
        assert events[-1].stop == stop

    for overlap in (False, True):
        for include_stop in (False, True):
            run(main(overlap, include_stop))


def test_choices_share_the_prompt_and_differ() -> None:
    params = SamplingParams(max_new_tokens=8, temperature=1.0, seed=5, n=6, ignore_eos=True)

    async def main(prompt: list[int], enable_prefix_caching: bool) -> None:
        runner = FakeRunner()
        async with make_engine(runner, enable_prefix_caching=enable_prefix_caching) as engine:
            events = await collect(engine, prompt, params)
            await assert_nothing_leaked(engine)
        for choice in range(6):
            expected = expected_tokens(prompt, params, choice=choice)
            assert token_ids(events, choice) == expected
        # The prompt once, its last token again for each other choice, all outputs but the last.
        assert runner.num_computed_tokens == len(prompt) + 5 + 6 * 7

    for prompt_len in (1, 2, 16, 17, 33, 40):
        for enable_prefix_caching in (False, True):
            run(main(list(range(prompt_len)), enable_prefix_caching))


def test_choices_whose_sibling_is_gone_compute_the_prompt_themselves() -> None:
    params = SamplingParams(max_new_tokens=1, temperature=1.0, seed=5, n=4)

    async def main() -> None:
        async with make_engine(enable_prefix_caching=False) as engine:
            events = await collect(engine, PROMPT, params)
            await assert_nothing_leaked(engine)
        for choice in range(4):
            assert token_ids(events, choice) == expected_tokens(PROMPT, params, choice=choice)

    run(main())


def test_more_choices_than_rows() -> None:
    params = SamplingParams(max_new_tokens=3, temperature=1.0, seed=1, n=11, ignore_eos=True)

    async def main() -> None:
        async with make_engine(FakeRunner(max_num_seqs=2)) as engine:
            events = await collect(engine, PROMPT, params)
            await assert_nothing_leaked(engine)
        for choice in range(11):
            assert token_ids(events, choice) == expected_tokens(PROMPT, params, choice=choice)

    run(main())


def test_prefix_cache_is_hit_and_reported() -> None:
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)

    async def main() -> None:
        runner = FakeRunner()
        async with make_engine(runner) as engine:
            first = await collect(engine, PROMPT, params)
            num_computed = runner.num_computed_tokens
            again = await collect(engine, PROMPT, params)
            salted = await collect(engine, PROMPT, params, cache_salt="other")
        assert first[0].num_cached_tokens == 0
        assert again[0].num_cached_tokens == 32
        assert salted[0].num_cached_tokens == 0
        assert runner.num_computed_tokens == 3 * num_computed - 32
        assert token_ids(first) == token_ids(again) == token_ids(salted)

    run(main())


def test_a_salt_also_guards_blocks_filled_by_output() -> None:
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)

    async def main() -> None:
        async with make_engine() as engine:
            events = await collect(engine, [1, 2], params, cache_salt="secret")
            known = [1, 2, *token_ids(events)]
            other = await collect(engine, known, params)
            same = await collect(engine, known, params, cache_salt="secret")
        assert other[0].num_cached_tokens == 0
        assert same[0].num_cached_tokens == 16

    run(main())


def test_a_full_prefix_hit_still_computes_a_token() -> None:
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    prompt = list(range(32))

    async def main() -> None:
        async with make_engine() as engine:
            first = await collect(engine, prompt, params)
            again = await collect(engine, prompt, params)
        assert again[0].num_cached_tokens == 16
        assert token_ids(first) == token_ids(again) == expected_tokens(prompt, params)

    run(main())


def test_logprobs_of_output_and_prompt() -> None:
    params = SamplingParams(max_new_tokens=5, ignore_eos=True, logprobs=2, prompt_logprobs=3)

    async def main() -> None:
        async with make_engine() as engine:
            await collect(engine, PROMPT, SamplingParams(max_new_tokens=1))
            events = await collect(engine, PROMPT, params)
            await assert_nothing_leaked(engine)
        head, *tokens = events
        assert head.num_cached_tokens == 0
        assert head.prompt is not None
        assert [token.token_id for token in head.prompt] == PROMPT
        assert head.prompt[0].logprob is None
        for i, token in enumerate(head.prompt[1:], start=1):
            assert token.logprob == logprob_of(PROMPT[:i], PROMPT[i])
            assert token.rank == PROMPT[i] + 1
            assert [(t.token_id, t.logprob) for t in token.top] == [
                (j, logprob_of(PROMPT[:i], j)) for j in range(3)
            ]
        output = expected_tokens(PROMPT, params)
        assert token_ids(tokens) == output
        for i, event in enumerate(tokens):
            assert event.logprob == logprob_of(PROMPT + output[:i], output[i])
            assert len(event.top) == 2

    run(main())


def test_echo_comes_first() -> None:
    async def main() -> None:
        async with make_engine() as engine:
            events = await collect(engine, "Hello", SamplingParams(max_new_tokens=2), echo=True)
        assert events[0].prompt is not None
        assert "".join(token.text for token in events[0].prompt) == "Hello"
        assert [event.prompt for event in events[1:]] == [None] * (len(events) - 1)

    run(main())


def test_preemption_changes_no_token() -> None:
    params = SamplingParams(max_new_tokens=60, temperature=1.0, repetition_penalty=1.2)
    prompts = [[i, *range(20)] for i in range(6)]

    async def main(**config: Any) -> int:
        runner = FakeRunner(num_blocks=16, max_model_len=128)
        async with make_engine(runner, **config) as engine:
            results = await asyncio.gather(
                *(
                    collect(
                        engine,
                        GenerationRequest(
                            request_id=str(i), prompt_token_ids=tuple(prompt), params=params
                        ),
                    )
                    for i, prompt in enumerate(prompts)
                )
            )
            await assert_nothing_leaked(engine)
            num_preemptions = engine.stats().totals.num_preemptions
        for prompt, events in zip(prompts, results, strict=True):
            seed = events[0].seed
            assert seed is not None
            assert token_ids(events) == expected_tokens(prompt, params, seed=seed, eos_ids=[EOS_ID])
        return num_preemptions

    assert run(main()) > 0
    assert run(main(enable_prefix_caching=False)) > 0
    assert run(main(guaranteed_no_evict=True)) == 0


def test_seeds_are_derived_and_reported() -> None:
    params = SamplingParams(max_new_tokens=3, temperature=1.0)

    async def main(seed: int) -> list[int | None]:
        async with make_engine(seed=seed) as engine:
            return [(await collect(engine, [1], params))[0].seed for _ in range(2)]

    first, second = run(main(1)), run(main(2))
    assert first == run(main(1))
    assert len({*first, *second}) == 4


@pytest.mark.parametrize("overlap", [False, True])
def test_every_choice_has_one_last_event_when_one_ended_before_the_abort(overlap: bool) -> None:
    params = SamplingParams(max_new_tokens=60, n=2, temperature=1.0, seed=3, ignore_eos=True)

    async def main() -> None:
        async with make_engine(FakeRunner(step_s=0.0005), overlap=overlap) as engine:
            events = await collect(engine, [1, 2], params)
            first, second = (token_ids(events, choice) for choice in (0, 1))
            stop_id = next(i for i in first[2:20] if i not in second)
            request = GenerationRequest(
                request_id="r",
                prompt_token_ids=(1, 2),
                params=replace(params, stop_token_ids=(stop_id,)),
            )
            last: list[tuple[int, FinishReason]] = []
            async for event in engine.generate(request):
                if event.finish_reason is not None:
                    last.append((event.choice, event.finish_reason))
                    engine.abort("r")
            assert last == [(0, FinishReason.STOP), (1, FinishReason.ABORT)]
            await assert_nothing_leaked(engine)

    run(main())


def test_many_likely_tokens_are_told_of_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In turns of the loop between which others have theirs; the same events."""
    params = SamplingParams(max_new_tokens=6, ignore_eos=True, n=8, temperature=1.0, logprobs=5)

    async def main() -> tuple[list[list[TokenEvent]], list[TokenEvent]]:
        async with make_engine(FakeRunner(max_num_seqs=8)) as engine:
            batches = [events async for events in engine.generate_batches(request)]
            await assert_nothing_leaked(engine)
        by_choice = sorted((e for events in batches for e in events), key=lambda e: e.choice)
        return batches, [replace(event, queue_seconds=0.0) for event in by_choice]

    request = GenerationRequest(
        request_id="r", prompt_token_ids=(1, 2, 3), params=replace(params, seed=4)
    )
    whole, events = run(main())
    assert max(map(len, whole)) == 8
    monkeypatch.setattr(delivery, "_RANKED_AT_ONCE", 10)
    parts, same = run(main())
    assert max(map(len, parts)) == 2
    assert same == events


def test_open_prompts_are_no_lists() -> None:
    """Through which each collection of garbage would go."""
    num_tokens = 397

    async def main() -> None:
        runner = FakeRunner(max_model_len=512, num_blocks=200)
        async with make_engine(runner) as engine:
            params = SamplingParams(max_new_tokens=20, ignore_eos=True)
            prompt = tuple((i * 7 + 5) % 200 for i in range(num_tokens))
            stream = engine.generate(prompt, params, echo=True)
            head = await anext(stream)
            begun = list(prompt[:9])  # as no other test's lists begin that are as long
            lists = [o for o in gc.get_objects() if type(o) is list and len(o) >= num_tokens]
            assert not [o for o in lists if type(o[0]) is int and o[:9] == begun]
            assert head.prompt is not None
            assert [token.token_id for token in head.prompt] == list(prompt)
            await stream.aclose()

    run(main())


def test_tokens_of_a_prompt_are_made_when_they_are_looked_at() -> None:
    scores = [None, *[(-0.5, (TokenLogprob(7, "t7", -0.5),), 2)] * 2]
    prompt = PromptTokens(array("i", [3, 7, 3]), lambda token_id: f"t{token_id}", scores)
    first, *others = prompt
    assert first == PromptToken(3, "t3", None)
    assert others == [PromptToken(i, f"t{i}", -0.5, scores[1][1], 2) for i in (7, 3)]
    assert prompt[1:] == others
    assert prompt[-1] == others[-1]
    assert (len(prompt), bool(PromptTokens((), str))) == (3, False)
    with pytest.raises(IndexError):
        prompt[3]
    assert prompt != list(prompt)


def test_tokens_of_a_prompt_go_to_another_process() -> None:
    texts = {3: "a", 7: "b"}
    prompt = PromptTokens(array("i", [3, 7, 3]), lambda token_id: texts[token_id])
    other = pickle.loads(pickle.dumps(prompt))
    texts.clear()
    assert [token.text for token in other] == ["a", "b", "a"]
    assert other == PromptTokens([3, 7, 3], lambda token_id: {3: "a", 7: "b"}[token_id])
