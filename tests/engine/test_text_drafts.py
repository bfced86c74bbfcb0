"""Texts that go on as others did take few steps, and those that don't are left alone."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from lmi_core import _native
from lmi_core._native import StepCosts
from lmi_core.engine import text_drafts
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.stats import EngineTotals
from lmi_core.engine.text_drafts import ForcedTokens, TextDrafts
from lmi_core.errors import UserError
from lmi_core.settings.speculation_config import SpeculationConfig
from tests.engine.fake_runner import FakeRunner
from tests.engine.harness import collect, make_engine, run, token_ids
from tests.engine.oracle import expected_tokens

PARAMS = SamplingParams(max_new_tokens=60, ignore_eos=True)


def drafter(text: list[int], history: list[list[int]] = [], **sizes: int) -> _native.Drafter:  # noqa: B006
    index = _native.TokenIndex(max_tokens=1000, num_key_tokens=2)
    for earlier in history:
        index.add_text(earlier)
    settings = {"max_tokens": 1000, "min_match": 2, "max_match": 32} | sizes
    made = _native.Drafter(history=index, **settings)
    made.start(text)
    return made


def test_a_text_goes_on_as_it_did_before() -> None:
    text = [1, 2, 3, 4, 5, 9, 1, 2]
    assert drafter(text).draft(3)[0] == [3, 4, 5]
    assert drafter([*text, 7]).draft(3)[0] == []


def test_the_place_that_agrees_with_more_tokens_wins() -> None:
    text = [1, 2, 3, 4, 8, 2, 3, 5, 7, 1, 2, 3]
    assert drafter(text).draft(1)[0] == [4]
    assert drafter([*text[:-3], 8, 2, 3]).draft(1)[0] == [5]


def test_a_text_that_repeats_itself_does_so_in_the_draft() -> None:
    ids, chances = drafter([1, 2, 3, 1, 2, 3, 1]).draft(7)
    assert ids == [2, 3, 1, 2, 3, 1, 2]
    assert chances == sorted(chances, reverse=True)
    assert 0 < chances[-1] < chances[0] < 1


def test_what_follows_tokens_that_may_come() -> None:
    text = [1, 2, 3, 4, 5, 9, 1, 2]
    made = drafter(text, history=[[20, 21, 22, 23], [3, 20, 30]])
    assert made.draft(2, [3])[0] == [4, 5]
    assert made.draft(4, [4, 5, 9])[0] == [1, 2, 3, 4]  # which is the text's end, and goes on
    assert made.draft(4, [20, 21])[0] == [22, 23]
    assert made.draft(4, [3, 20])[0] == [30]
    assert made.draft(4, [4, 3])[0] == []
    assert made.draft(2)[0] == [3, 4]  # as if nobody had asked


def test_earlier_texts_end_where_they_ended() -> None:
    made = drafter([5, 1, 2], history=[[1, 2, 3, 4], [7, 8, 9]])
    assert made.draft(9)[0] == [3, 4]


def test_a_token_that_differs_does_not_lose_the_place() -> None:
    earlier = list(range(100, 140))
    made = drafter([100, 101, 102], history=[earlier])
    made.extend([103, 104, 99])
    assert made.draft(3)[0] == [106, 107, 108]
    made.extend([98, 97])
    assert made.draft(3)[0] == []


def test_nothing_is_to_come_behind_a_texts_end() -> None:
    text = [1, 2, 3, 4, 5, 6, 1, 2]
    request = Mock(prefix_seed=b"")
    for end_ids, count in ((frozenset(), 4), (frozenset({5}), 1), (frozenset({3}), 0)):
        sequence = Mock(
            token_ids=text, num_prompt=len(text), end_ids=end_ids, request=request, matcher=None
        )
        drafts = TextDrafts(SpeculationConfig())
        assert len(drafts.next_chances(sequence, 4)) == count


def test_chances_follow_what_was_right() -> None:
    rng = random.Random(3)
    earlier = [rng.randrange(1000, 2000) for _ in range(400)]
    right, wrong = drafter(earlier[:2], [earlier]), drafter(earlier[:2], [earlier])
    right.extend(earlier[2:60])
    assert right.draft(8)[1][-1] > 0.9
    assert right.next_chances(8)[0] > 0.95
    for i in range(2, 200, 2):  # two tokens as before, then one that isn't
        wrong.extend([earlier[i + 1], *earlier[i : i + 2]])
    assert wrong.draft(8)[1][0] < 0.3


def test_texts_start_from_how_often_others_were_guessed() -> None:
    rates = _native.GuessRates(memory=0.998)
    index = _native.TokenIndex(max_tokens=1000, num_key_tokens=2)
    index.add_text(list(range(100, 200)))

    def made() -> _native.Drafter:
        one = _native.Drafter(max_tokens=99, min_match=2, max_match=8, history=index, rates=rates)
        one.start([100, 101])
        return one

    first_chance = made().draft(1)[1][0]
    for _ in range(50):
        made().extend([7])
    assert made().draft(1)[1][0] < 0.1 < first_chance
    for _ in range(500):
        made().extend([102])
    assert made().draft(1)[1][0] > first_chance


def test_what_is_remembered_is_bounded() -> None:
    index = _native.TokenIndex(max_tokens=100, num_key_tokens=2)
    rng = random.Random(1)
    text = [rng.randrange(10**6) for _ in range(1000)]
    for start in range(0, 1000, 50):
        index.add_text(text[start : start + 50])
        assert len(index) <= 100
    made = _native.Drafter(max_tokens=100, min_match=2, max_match=8, history=index)
    made.start(text[960:962])
    assert made.draft(4)[0] == text[962:966]
    forgotten = _native.Drafter(max_tokens=100, min_match=2, max_match=8, history=index)
    forgotten.start(text[60:62])
    assert forgotten.draft(4)[0] == []
    # A place that is forgotten while it is in use isn't read.
    for start in range(0, 1000, 50):
        index.add_text(text[start : start + 50])
    made.extend(text[962:970])
    made.draft(4)


def test_what_is_forgotten_meanwhile_leaves_the_texts_own_place() -> None:
    """A vote of other texts that are gone by the time that it is asked for."""
    index = _native.TokenIndex(max_tokens=100, num_key_tokens=2)
    for _ in range(12):
        index.add_text([1, 2, 8])
    made = _native.Drafter(max_tokens=1000, min_match=2, max_match=32, history=index)
    made.start([1, 2, 3, 1, 2, 4, 5, 1, 2])
    assert made.draft(1)[0] == [8]
    index.add_text(list(range(100, 220)))
    assert made.draft(3)[0] == [4, 5, 1]


def test_chances_behind_a_vote_are_the_votes() -> None:
    """What a place says behind a wrong guess is of no use where votes are drafted."""
    made = drafter([6, 1, 2], history=[[1, 2, 8, 9, 7]] * 12)
    chances = made.draft(3)[1]
    assert made.next_chances(2) == chances[1:]


def test_sizes_are_checked() -> None:
    with pytest.raises(_native.NativeError, match="matches of 5 to 4"):
        drafter([1], min_match=5, max_match=4)
    with pytest.raises(UserError, match="max_draft_tokens is 65; allowed are 1 to 64"):
        SpeculationConfig(max_draft_tokens=65)


async def ask(
    prompts: list[list[int]], *, speculation: SpeculationConfig | None, salts: tuple[str, ...] = ()
) -> EngineTotals:
    """Each of ``prompts`` after the other, with the same text each time."""
    async with make_engine(FakeRunner(runs_ahead=True), speculation=speculation) as engine:
        for i, prompt in enumerate(prompts):
            request = GenerationRequest(
                request_id=str(i),
                prompt_token_ids=tuple(prompt),
                params=PARAMS,
                cache_salt=salts[i] if salts else "",
            )
            events = await collect(engine, request)
            assert token_ids(events) == expected_tokens(prompt, PARAMS)
        return engine.stats().totals


@pytest.fixture(autouse=True)
def cheap_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of the fake runner take no time that could be measured."""
    monkeypatch.setattr(StepCosts, "note", lambda self, num_rows, seconds: None)


def test_a_text_that_was_generated_before_takes_few_steps() -> None:
    config = SpeculationConfig()
    once = run(ask([[1, 2, 3]], speculation=config))
    twice = run(ask([[1, 2, 3]] * 2, speculation=config))
    assert once.num_steps <= 61
    assert twice.num_steps - once.num_steps <= 8
    assert twice.num_accepted_tokens >= 52


def test_texts_of_others_are_not_drafted() -> None:
    """By how long it takes, nobody may see what is generated with another salt."""
    totals = run(ask([[1, 2, 3]] * 2, speculation=SpeculationConfig(), salts=("a", "b")))
    assert totals.num_accepted_tokens <= 2


def test_nothing_is_drafted_unless_asked_for() -> None:
    totals = run(ask([[1, 2, 3]] * 2, speculation=None))
    assert totals.num_draft_tokens == 0
    assert totals.num_steps == 120


def test_random_texts_keep_running_ahead() -> None:
    async def main() -> None:
        runner = FakeRunner(runs_ahead=True)
        async with make_engine(runner, speculation=SpeculationConfig()) as engine:
            params = replace(PARAMS, max_new_tokens=100)
            await asyncio.gather(*(collect(engine, [i], params) for i in range(4)))
            assert runner.num_ahead > 0.8 * engine.stats().totals.num_steps

    run(main())


def test_forced_tokens_are_as_likely_as_they_were_right() -> None:
    forced = ForcedTokens()
    for is_right in (True, False):
        text = [1, 2]
        sequence: Any = Mock(matcher=Mock(forced_tokens=lambda: [7, 8]), token_ids=text)
        for _ in range(40):
            assert forced.next(sequence) == [7, 8]
            text += [7, 8, 3] if is_right else [6, 3]
        assert (forced.chance > 0.9) == is_right
        assert (forced.chance < 0.2) != is_right


def test_texts_and_forced_tokens_draft_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind what a text went on with comes what the grammar forces there, and texts again."""
    monkeypatch.setattr(text_drafts, "_LEAST_CHANCE_TO_GO_ON", 0.0)
    drafts = TextDrafts(SpeculationConfig())
    drafts.remember(b"", [5, 6, 7, 0, 40, 41, 8])
    drafts.remember(b"", [30, 31, 8, 9, 2, 10])
    forced = {(): [], (7, 0): [30, 31]}
    sequence: Any = Mock(
        token_ids=[5, 6],
        num_prompt=2,
        end_ids=frozenset({2}),
        request=Mock(prefix_seed=b""),
        matcher=Mock(
            forced_tokens=lambda behind=(): forced.get(tuple(behind), []),
            num_allowed=lambda ids: ids.index(40) if 40 in ids else len(ids),
        ),
    )
    for most in (16, 3):
        draft = drafts.draft(sequence, most)
        assert draft is not None
        assert draft.token_ids == [7, 0, 30, 31, 8, 9][:most]
        assert draft.chances == sorted(draft.chances, reverse=True)
        assert draft.source == "text"
    forced[()] = [7, 0]
    draft = drafts.draft(sequence, 16)
    assert draft is not None
    assert draft.source == "grammar"
    forced[()] = [7, 2, 0]
    draft = drafts.draft(sequence, 16)
    assert draft is not None
    assert (draft.token_ids, len(draft.chances)) == ([7], 1), "nothing follows an end"
    sequence.matcher = None
    draft = drafts.draft(sequence, 16)
    assert draft is not None
    assert draft.token_ids == [7, 0, 40, 41, 8]
