"""Drafts decide how many steps a text takes, and nothing else."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from lmi_core import _native
from lmi_core.engine import speculation
from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.sequence import Sequence
from lmi_core.engine.text_drafts import Draft
from lmi_core.errors import EngineError
from lmi_core.settings.speculation_config import SpeculationConfig
from tests.engine.fake_runner import VOCAB_SIZE, FakeRunner
from tests.engine.harness import assert_nothing_leaked, collect, make_engine, run, token_ids, until
from tests.engine.oracle import expected_tokens
from tests.engine.random_drafts import SPECULATION, draft_at_random, draft_whatever_it_costs
from tests.engine.test_run_ahead import requests, summary

PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)


class KnownTexts:
    """Implements ``DraftSource``: what is known of a prompt is drafted, and waited for."""

    def __init__(self, *texts: list[int]) -> None:
        self._texts = texts

    def draft(self, sequence: Sequence, max_tokens: int) -> Draft:
        tokens = self._rest(sequence)[:max_tokens]
        return Draft(tokens, [1.0] * len(tokens))

    def next_chances(self, sequence: Sequence, max_tokens: int) -> list[float]:
        return [1.0] * len(self._rest(sequence)[1 : max_tokens + 1])

    def end(self, sequence: Sequence) -> None:
        pass

    def _rest(self, sequence: Sequence) -> list[int]:
        for text in self._texts:
            if text[: len(sequence.token_ids)] == sequence.token_ids.tolist():
                return text[len(sequence.token_ids) :]
        return []


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(*texts: list[int]) -> None:
        monkeypatch.setattr(speculation, "TextDrafts", lambda config: KnownTexts(*texts))
        draft_whatever_it_costs(monkeypatch)

    return use


def text_of(prompt: list[int], params: SamplingParams = PARAMS) -> list[int]:
    return prompt + expected_tokens(prompt, params)


def speculating(runner: FakeRunner, num_draft_tokens: int = 4, **config: Any) -> Any:
    speculation = SpeculationConfig(max_draft_tokens=num_draft_tokens)
    return make_engine(runner, speculation=speculation, **config)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacities", [{}, {"num_blocks": 18}, {"max_num_seqs": 3}])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_same_events_as_without(
    seed: int, capacities: dict[str, int], runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    truths: dict[Any, list[int]] = {}

    async def main(runner: FakeRunner, **config: Any) -> list[list[tuple[Any, ...]]]:
        async with make_engine(runner, **config) as engine:
            asked = requests(seed)
            results = await asyncio.gather(*(collect(engine, *request) for request in asked))
            await assert_nothing_leaked(engine)
            for (prompt, params), events in zip(asked, results, strict=True):
                for choice in range(params.n):
                    truths[tuple(prompt), params.seed, choice] = token_ids(events, choice)
            drafted.append(engine.stats().totals)
        return [summary(events) for events in results]

    drafted: list[Any] = []
    expected = run(main(FakeRunner(**capacities), overlap=False))
    draft_at_random(monkeypatch, truths, VOCAB_SIZE)
    runner = FakeRunner(runs_ahead=runs_ahead, **capacities)
    assert run(main(runner, speculation=SPECULATION)) == expected
    assert 0 < drafted[1].num_accepted_tokens < drafted[1].num_draft_tokens
    assert drafted[1].num_steps < drafted[0].num_steps
    assert drafted[0].num_draft_tokens == 0


def test_a_known_text_takes_a_step_for_each_depth(known: Any) -> None:
    known(text_of([1, 2, 3]))

    async def main() -> None:
        runner = FakeRunner(runs_ahead=True)
        async with speculating(runner) as engine:
            events = await collect(engine, [1, 2, 3], PARAMS)
            assert [event.num_generated_tokens for event in events] == list(range(1, 25))
            totals = engine.stats().totals
            # The prompt's step, then five tokens each.
            assert totals.num_steps == 1 + -(-23 // 5)
            assert totals.num_accepted_tokens == totals.num_draft_tokens
            assert totals.num_steps == 24 - totals.num_accepted_tokens
            assert totals.num_generated_tokens == 24

    run(main())


def test_neighbours_keep_running_ahead(known: Any) -> None:
    """They are in every step, submitted before the last one's tokens are known, while one that
    speculates is in every second."""
    known(text_of([1, 2, 3], replace(PARAMS, max_new_tokens=60)))

    async def main() -> None:
        runner = FakeRunner(runs_ahead=True)
        async with speculating(runner) as engine:
            other = asyncio.create_task(collect(engine, [7], replace(PARAMS, max_new_tokens=60)))
            await until(lambda: runner.num_ahead > 2)
            events = await collect(engine, [1, 2, 3], replace(PARAMS, max_new_tokens=30))
            totals = engine.stats().totals
            assert totals.num_accepted_tokens >= 20
            num_sync = totals.num_steps - runner.num_ahead
            assert num_sync <= 6  # around the arrivals of both
            params = replace(PARAMS, max_new_tokens=30)
            assert token_ids(events) == expected_tokens([1, 2, 3], params)
            expected = expected_tokens([7], replace(PARAMS, max_new_tokens=60))
            assert token_ids(await other) == expected

    run(main())


def test_drafts_take_nothing_that_others_need(known: Any) -> None:
    """Two sequences that fill all blocks, and drafts that would fill them earlier."""
    prompts = [[1, 2, 3], [4, 5, 6]]
    params = replace(PARAMS, max_new_tokens=29)
    known(*(text_of(prompt, replace(params, max_new_tokens=60)) for prompt in prompts))

    async def main() -> None:
        runner = FakeRunner(num_blocks=4, max_num_seqs=2, max_num_batched_tokens=7)
        async with speculating(runner, 9) as engine:
            results = await asyncio.gather(*(collect(engine, p, params) for p in prompts))
            for prompt, events in zip(prompts, results, strict=True):
                assert token_ids(events) == expected_tokens(prompt, params)
            totals = engine.stats().totals
            assert totals.num_preemptions == 0
            assert totals.num_accepted_tokens > 20
            await assert_nothing_leaked(engine)

    run(main())


def test_blocks_of_rejected_drafts_are_given_back(known: Any) -> None:
    wrong = text_of([1, 2, 3])
    wrong[10:] = [(token + 1) % 200 for token in wrong[10:]]
    known(wrong)

    async def main() -> None:
        runner = FakeRunner(block_size=16)
        num_used: list[int] = []

        def note(number: int) -> str:
            num_used.append(runner.pool.num_used)
            return ""

        runner.fail_step = note
        async with speculating(runner, 16) as engine:
            events = await collect(engine, [1, 2, 3], PARAMS)
            assert token_ids(events) == expected_tokens([1, 2, 3], PARAMS)
            await assert_nothing_leaked(engine)
        # The prompt; drafts into the next block, of which six are right; then token by token.
        assert num_used == [1, 2, *[1] * 6, *[2] * 10]

    run(main())


def test_nothing_follows_the_end_within_drafts(known: Any) -> None:
    prompt = [1, 2, 3]
    text = text_of(prompt)
    known(text)
    end_id = next(token for i, token in enumerate(text[8:], 8) if token not in text[3:i])
    params = replace(PARAMS, stop_token_ids=(end_id,))

    async def main() -> None:
        async with speculating(FakeRunner(), 16) as engine:
            events = await collect(engine, prompt, params)
            assert events[-1].finish_reason is FinishReason.STOP
            assert token_ids(events) == expected_tokens(prompt, params)
            assert engine.stats().totals.num_generated_tokens == len(events)
            await assert_nothing_leaked(engine)

    run(main())


def test_a_stop_text_within_drafts_ends_the_count_of_tokens(known: Any) -> None:
    records = []

    class Observer:
        def on_request(self, record: Any) -> None:
            records.append(record)

        def __getattr__(self, name: str) -> Any:
            return lambda *args: None

    prompt = [1, 2, 3]
    params = replace(PARAMS, stop=("Q", "a", "7", "e"), max_new_tokens=200)
    known(text_of(prompt, replace(PARAMS, max_new_tokens=200)))

    async def main(engine: Any) -> list[Any]:
        async with engine:
            return summary(await collect(engine, prompt, params))

    expected = run(main(make_engine(observer=Observer())))
    assert run(main(speculating(FakeRunner(), 16, observer=Observer()))) == expected
    assert expected[-1][-1] == "stop_sequence"
    assert records[0].num_generated_tokens == records[1].num_generated_tokens == len(expected)


@pytest.mark.parametrize("failing", range(3, 12))
def test_a_failed_step_fails_nobody_who_was_not_in_it(failing: int, known: Any) -> None:
    """One that speculates beside others is in the step behind the failed one, or in itself."""
    params = replace(PARAMS, max_new_tokens=40)
    known(text_of([1, 2, 3], params))

    async def main() -> None:
        runner = FakeRunner(runs_ahead=True)
        served: list[int] = []
        submit, submit_ahead = runner.submit, runner.submit_ahead

        def note(step: Any) -> None:
            served.append(int(step.num_seqs))

        runner.submit = lambda step: (note(step), submit(step))  # type: ignore[assignment]
        runner.submit_ahead = lambda step, rows: (note(step), submit_ahead(step, rows))  # type: ignore[assignment]
        runner.fail_step = lambda number: "out of luck" if number == failing else ""
        async with speculating(runner) as engine:
            names = ([7], [1, 2, 3])
            results = await asyncio.gather(
                *(collect(engine, prompt, params) for prompt in names), return_exceptions=True
            )
            num_failed = sum(isinstance(result, EngineError) for result in results)
            assert num_failed == served[failing]
            for prompt, result in zip(names, results, strict=True):
                if not isinstance(result, BaseException):
                    assert token_ids(result) == expected_tokens(prompt, params)
            await assert_nothing_leaked(engine)

    run(main())


def test_abort_at_any_moment(known: Any) -> None:
    params = replace(PARAMS, max_new_tokens=60)
    known(text_of([9, 8], params))

    async def main() -> None:
        runner = FakeRunner(step_s=0.0002, runs_ahead=True)
        async with speculating(runner) as engine:
            for delay in range(40):
                other = asyncio.create_task(collect(engine, [1, 2, 3], PARAMS))
                request = GenerationRequest(request_id="x", prompt_token_ids=(9, 8), params=params)
                task = asyncio.create_task(collect(engine, request))
                for _ in range(delay):
                    await asyncio.sleep(0)
                engine.abort("x")
                await task
                assert token_ids(await other) == expected_tokens([1, 2, 3], PARAMS)
                await assert_nothing_leaked(engine)

    run(main())


def test_the_prefix_index_never_sees_what_was_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fake cache knows which token each slot has: a block published with another one shows."""
    prompt = list(range(13))
    expected = expected_tokens(prompt, replace(PARAMS, max_new_tokens=60))
    draft_at_random(monkeypatch, {(tuple(prompt), None, 0): expected}, VOCAB_SIZE)

    async def main() -> None:
        runner = FakeRunner(runs_ahead=True, block_size=4)
        async with make_engine(runner, speculation=SPECULATION) as engine:
            for count in (11, 23, 37):
                await collect(engine, prompt, replace(PARAMS, max_new_tokens=count))
                events = await collect(engine, [*prompt, *expected[:40]], PARAMS)
                assert events[0].num_cached_tokens >= 4 * ((12 + count) // 4)
                assert token_ids(events)[:10] == expected[40:50]

    run(main())


def test_rows_count_drafts_as_generated() -> None:
    """For samplers in Python and on devices; the CPU's are compared by what they sample."""

    def table(num_seen: int) -> _native.SamplingTable:
        made = _native.SamplingTable(1, 50)
        made.set(
            0,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            typical_p=1.0,
            repetition_penalty=1.2,
            presence_penalty=0.5,
            frequency_penalty=0.1,
            seed=1,
            choice=0,
            num_logprobs=0,
            banned_ids=[49],
            min_tokens=4,
            min_tokens_banned_ids=[48],
        )
        made.observe_prompt(0, [3, 4])
        made.observe_many(0, text[:num_seen])
        return made

    text = [4, 7, 7, 3, 7, 9]
    for num_drafts in range(len(text) + 1):
        num_seen = len(text) - num_drafts
        expected = table(len(text)).gather([0])
        got = table(num_seen).gather([0], [text[num_seen:]])
        for name in ("seen", "bans", "biases"):
            pairs = [sorted(zip(*map(list, edits[name]), strict=True)) for edits in (got, expected)]
            assert pairs[0] == pairs[1], (name, num_drafts)
    assert 48 in table(3).gather([0])["bans"][1]
    assert 48 not in table(3).gather([0], [[1]])["bans"][1]
