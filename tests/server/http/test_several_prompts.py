"""Events of one call on their way to its renderer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence

import pytest

from lmi_core.engine.outputs import TokenEvent
from lmi_server.dialects.openai.completion_output import CompletionSseRenderer
from lmi_server.http.several_prompts import NumberedEvents, in_turns
from tests.server.fake_engine import FakeEngine
from tests.server.harness import serving


@pytest.mark.parametrize("prompt", ["He is", ["He is", "She is"]])
def test_each_choice_shows_a_long_prompt_in_a_turn_of_its_own(
    prompt: str | list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fed: list[int] = []
    feed = CompletionSseRenderer.feed

    def spy(self: CompletionSseRenderer, index: int, events: Sequence[TokenEvent]) -> bytes:
        fed.append(len(events))
        return feed(self, index, events)

    monkeypatch.setattr(CompletionSseRenderer, "feed", spy)
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
        async for [(index, events)] in in_turns(batch()):
            seen.append((index, len(events), num_turns))
        assert [each[:2] for each in seen] == [(0, 1)] * 3 + [(1, 1)] * 2
        assert len({each[2] for each in seen}) == 5

    asyncio.run(run())
