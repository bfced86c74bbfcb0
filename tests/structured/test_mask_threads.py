"""Masks are filled beside the event loop, and one that takes too long fails its own request."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from lmi_core.engine import parts
from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import EngineError, UserError
from lmi_core.structured import mask_threads
from lmi_core.structured.grammar import Grammar
from lmi_core.structured.matcher import Mask
from tests.engine.fake_runner import FakeRunner
from tests.engine.harness import assert_nothing_leaked, collect, make_engine, run, token_ids

ALLOWED_ID = 65


class Rules:
    """A library whose one grammar allows one token; ``slow`` spends time on the third mask until it
    is told to end."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.is_spinning, self.may_end = threading.Event(), threading.Event()

    def compile(self, grammar: Grammar) -> Rules.Compiled:
        return Rules.Compiled(self, grammar.text == "slow")

    class Compiled:
        def __init__(self, rules: Rules, is_slow: bool) -> None:
            self.rules, self.is_slow = rules, is_slow

        def matcher(self) -> Rules.Follower:
            return Rules.Follower(self.rules, self.is_slow)

    class Follower:
        is_complete = is_spent = False

        def __init__(self, rules: Rules, is_slow: bool) -> None:
            self.rules, self.is_slow = rules, is_slow
            self.num_masks = 0

        def fill_mask(self, mask: Mask) -> None:
            self.rules.threads.add(threading.get_ident())
            self.num_masks += 1
            if self.is_slow and self.num_masks == 3:
                self.rules.is_spinning.set()
                while not self.rules.may_end.is_set():
                    time.thread_time()
            mask[ALLOWED_ID // 32] = 1 << ALLOWED_ID % 32

        def accept(self, token_id: int) -> None:
            assert token_id == ALLOWED_ID

        def rollback(self, num_tokens: int) -> None:
            raise AssertionError


def params(text: str) -> SamplingParams:
    return SamplingParams(grammar=Grammar.regex(text), max_new_tokens=6)


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Rules:
    made = Rules()
    monkeypatch.setattr(parts, "load_library", lambda *_, **__: made)
    return made


@pytest.mark.parametrize("overlap", [True, False])
def test_the_loops_thread_fills_none(rules: Rules, overlap: bool) -> None:
    async def use() -> None:
        async with make_engine(FakeRunner(), overlap=overlap) as engine:
            results = await asyncio.gather(
                *(collect(engine, [1, number], params("quick")) for number in range(4))
            )
            assert all(token_ids(events) == [ALLOWED_ID] * 6 for events in results)
            await assert_nothing_leaked(engine)
        assert threading.get_ident() not in rules.threads

    run(use())
    assert rules.threads


def test_one_that_takes_too_long_fails_alone(rules: Rules, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its thread goes on, which nothing can stop, others are served to their end."""
    monkeypatch.setattr(mask_threads, "MAX_MASK_S", 0.05)
    monkeypatch.setattr(mask_threads, "_CHECK_S", 0.01)

    async def use() -> None:
        async with make_engine(FakeRunner()) as engine:
            slow = asyncio.create_task(collect(engine, [1, 2], params("slow")))
            quick = [collect(engine, [1, number], params("quick")) for number in range(4)]
            results = await asyncio.gather(*quick)
            with pytest.raises(UserError, match=r"mask takes more than 0\.05 s of pro"):
                await slow
            assert rules.is_spinning.is_set()
            later = await collect(engine, [5, 6], params("quick"))
            for events in (*results, later):
                assert token_ids(events) == [ALLOWED_ID] * 6
                assert events[-1].finish_reason is FinishReason.LENGTH
            assert engine.healthy
            await assert_nothing_leaked(engine)
            rules.may_end.set()

    try:
        run(use())
    finally:
        rules.may_end.set()


def test_without_threads_the_request_fails(rules: Rules, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use() -> None:
        async with make_engine(FakeRunner()) as engine:
            with monkeypatch.context() as patch:
                patch.setattr(mask_threads.MaskThreads, "_start_thread", refuse)
                with pytest.raises(EngineError, match="can't start new thread"):
                    await collect(engine, [1, 2], params("quick"))
            assert len(await collect(engine, [1, 2], params("quick"))) == 6
            await assert_nothing_leaked(engine)

    run(use())


def refuse(_: object) -> None:
    raise RuntimeError("can't start new thread")


class Costly:
    """A grammar of one token, whose every mask takes 60 ms of processor time."""

    def __init__(self) -> None:
        self.position = 0

    def fill_mask(self, mask: Mask) -> None:
        end_s = time.thread_time() + 0.06
        while time.thread_time() < end_s:
            pass
        mask[ALLOWED_ID // 32] = 1 << ALLOWED_ID % 32

    def accept(self, token_id: int) -> None:
        self.position += 1

    def rollback(self, num_tokens: int) -> None:
        self.position -= num_tokens


@pytest.mark.parametrize(
    ("drafts", "kept"),
    [
        ([ALLOWED_ID] * 20, [ALLOWED_ID] + [-1] * 19),  # their masks would take too long
        ([7, ALLOWED_ID], [-1, -1]),  # which the grammar doesn't allow
        ([], []),
    ],
)
def test_drafts_are_followed_as_far_as_the_grammar_and_time_allow(
    drafts: list[int], kept: list[int]
) -> None:
    async def main() -> None:
        costly, done = Costly(), asyncio.Event()
        errors: list[Exception | None] = []
        loop = asyncio.get_running_loop()

        def ready(error: Exception | None) -> None:
            errors.append(error)
            loop.call_soon_threadsafe(done.set)

        masks = [np.ones(8, np.uint32) for _ in range(len(drafts) + 1)]
        threads = mask_threads.MaskThreads()
        threads.fill([mask_threads.MissingMask(costly, masks, ready, drafts)])  # type: ignore[arg-type]
        await done.wait()
        threads.close()
        assert errors == [None]
        assert drafts == kept
        assert costly.position == 0
        num_filled = 1 + kept.count(ALLOWED_ID)
        assert [bool(mask.any()) for mask in masks] == [i < num_filled for i in range(len(masks))]

    run(main())
