"""Events of one call on their way to its renderer."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from lmi_core.demo import MODEL_DIR
from lmi_core.engine.engine import Engine
from lmi_core.engine.outputs import FinishReason, PromptToken, TokenEvent, TokenLogprob
from lmi_core.text.tokenizer import Tokenizer
from lmi_server.dialects.openai.completion_output import (
    CompletionRenderer,
    CompletionStreamRenderer,
    Echo,
)
from lmi_server.dialects.openai.output import Answer
from lmi_server.http.metrics import Metrics
from lmi_server.http.portions import MOST, NumberedEvents, in_turns, portions
from tests.engine.harness import assert_nothing_leaked
from tests.server.fake_engine import FakeEngine
from tests.server.harness import serving, serving_backend

TOO_LONG = "She is " * 2000


@pytest.mark.parametrize("prompt", ["He is", ["He is", "She is"]])
def test_each_choice_shows_a_long_prompt_in_a_turn_of_its_own(
    prompt: str | list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fed: list[int] = []
    feed = CompletionStreamRenderer.feed

    def spy(self: CompletionStreamRenderer, index: int, events: Sequence[TokenEvent]) -> bytes:
        fed.append(len(events))
        return feed(self, index, events)

    monkeypatch.setattr(CompletionStreamRenderer, "feed", spy)
    body = {"prompt": prompt, "n": 3, "max_tokens": 2, "stream": True}

    async def run(**more: object) -> None:
        fed.clear()
        async with serving(FakeEngine()) as served:
            answer = await served.post({**body, **more}, "/v1/completions")
            frames = answer.body.decode().split("\n\n")[:-2]
            choices = [json.loads(frame.removeprefix("data: "))["choices"][0] for frame in frames]
            assert len(choices) == 6 * (1 if isinstance(prompt, str) else 2)

    asyncio.run(run())
    assert max(fed) == 3
    asyncio.run(run(echo=True, logprobs=1))
    assert max(fed) == 1


def test_choices_are_gone_once_they_are_written() -> None:
    """All at once, they would end with the interpreter's lock held."""

    class Text(str):  # which can have weak references
        pass

    answer = Answer(id="i", model="m", error=lambda _: b"", num_prompts=3, logprobs=True)
    echo = Echo(prompts=("a", "a", "a"))
    renderer = CompletionRenderer(answer, echo, num_candidates=1)
    texts = []
    for index in range(3):
        text = Text("a")
        texts.append(weakref.ref(text))
        top = (TokenLogprob(1, "a", -1.0),)
        prompt = (PromptToken(1, text, None), PromptToken(1, "b", -1.0, top))
        renderer.feed(index, [TokenEvent("r", 0, -1, "", prompt=prompt)])
        renderer.feed(
            index, [TokenEvent("r", 0, 1, "b", logprob=-1.0, finish_reason=FinishReason.LENGTH)]
        )
        del text, prompt
    assert all(text() is not None for text in texts)
    choices = json.loads(renderer.finish())["choices"]
    assert [choice["text"] for choice in choices] == ["ab"] * 3
    assert [choice["logprobs"]["tokens"] for choice in choices] == [["a", "b", "b"]] * 3
    assert all(text() is None for text in texts)


def test_a_refused_prompt_refuses_the_stream_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the first one has said until the last one is read."""
    encode = Tokenizer.encode

    async def slow(self: Tokenizer, text: str, **options: Any) -> Any:
        await asyncio.sleep(0.1 if text == TOO_LONG else 0)
        return await encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    body = {"prompt": ["He is", TOO_LONG], "max_tokens": 20, "stream": True}

    async def run() -> None:
        async with Engine(MODEL_DIR) as engine, serving_backend(engine, Metrics()) as served:
            answer = await served.post(body, "/v1/completions")
            assert answer.status == 400, answer.body
            assert b"number 1, counted from 0" in answer.body
            await assert_nothing_leaked(engine)
            answer = await served.post({**body, "prompt": ["He is"] * 20}, "/v1/completions")
            assert answer.status == 200
            assert answer.body.endswith(b"data: [DONE]\n\n")

    asyncio.run(run())


def test_portions_cost_about_the_same() -> None:
    plain = [TokenEvent("r", i % 3, i, "a") for i in range(3000)]
    ranked = TokenEvent("r", 0, 1, "a", top=(TokenLogprob(1, "a", -1.0),) * 500)
    batch: NumberedEvents = [(0, plain), (1, [ranked] * 20), (2, []), (3, plain[:5])]
    found = list(portions(batch))
    assert max(sum(len(events) for _, events in portion) for portion in found) == MOST // 4
    assert max(sum(len(e.top) for _, events in p for e in events) for p in found) <= MOST + 500
    assert 4 < len(found) < 10
    for index, events in batch:
        assert [e for portion in found for i, part in portion if i == index for e in part] == events
    assert list(portions([])) == []


class Formatted(list[TokenEvent]):
    """As a model's own formatter gives them, with what it made of them."""


def test_what_comes_with_events_stays_with_them() -> None:
    many = Formatted([TokenEvent("r", 0, 1, "a")] * 3000)
    assert [portion[0][1] is many for portion in portions([(0, many)])] == [True]
    few = [TokenEvent("r", 0, 1, "a")]
    [[(_, found), *_]] = portions([(0, few), (1, Formatted(few))])
    assert found is few


def test_others_have_their_turns_between_events() -> None:
    async def batch() -> AsyncGenerator[NumberedEvents, None]:
        event = TokenEvent("r", 0, 1, "a")
        yield [(0, [event] * 3), (1, [event] * 2)]

    async def run() -> None:
        loop, num_turns, seen = asyncio.get_running_loop(), 0, []

        def count() -> None:
            nonlocal num_turns
            num_turns += 1
            loop.call_soon(count)

        count()
        async for [(index, events)] in in_turns(batch(), 1):
            seen.append((index, len(events), num_turns))
        assert [each[:2] for each in seen] == [(0, 1)] * 3 + [(1, 1)] * 2
        assert len({each[2] for each in seen}) == 5

    asyncio.run(run())
