"""The real ``anthropic`` client against a real server process with a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from lmi_core.demo import MODEL_DIR
from tests.cli.test_native import serving

anthropic: Any = None
pytestmark = pytest.mark.timeout(180)

KEY = "a-secret-key"
ASKED: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 12,
    "messages": [{"role": "user", "content": "Go"}],
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "of a city", "input_schema": SCHEMA}


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    """Thousands of modules, which workers needn't have that run other tests."""
    global anthropic
    anthropic = pytest.importorskip("anthropic", reason="the anthropic client isn't installed")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(str(MODEL_DIR), "--api-key", KEY, "--served-model-name", "demo") as base:
        yield base


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


def test_messages(client: Any) -> None:
    whole = client.messages.create(**ASKED)
    assert whole.content[0].text
    with client.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].text == text
    assert final.usage.output_tokens > 0


def test_count_tokens(client: Any) -> None:
    counted = client.messages.count_tokens(model="demo", messages=ASKED["messages"])
    assert counted.input_tokens == client.messages.create(**ASKED).usage.input_tokens


def test_models(client: Any) -> None:
    [listed] = client.models.list()
    asked = client.models.retrieve("demo")
    assert listed.id == asked.id == asked.display_name == "demo"
    assert (asked.type, asked.created_at.year > 2000) == ("model", True)
    with pytest.raises(anthropic.NotFoundError, match="'nope' does not exist"):
        client.models.retrieve("nope")


def test_what_isnt_there_says_why(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="batch_dir"):
        client.messages.batches.list()
    with pytest.raises(anthropic.NotFoundError) as refused:
        client.post("/v1/messages/nope", body={}, cast_to=object)
    assert refused.value.body["error"]["type"] == "not_found_error"
    assert "/v1/messages/nope" in refused.value.body["error"]["message"]


def test_a_loop_of_three_calls(client: Any) -> None:
    messages = list(ASKED["messages"])
    choice = {"type": "any", "disable_parallel_tool_use": True}
    for number in range(3):
        asked = {**ASKED, "max_tokens": 80, "messages": messages, "tools": [WEATHER]}
        if number % 2:
            with client.messages.stream(**asked, tool_choice=choice) as stream:
                said = stream.get_final_message()
        else:
            said = client.messages.create(**asked, tool_choice=choice)
        assert said.stop_reason == "tool_use"
        [call] = [block for block in said.content if block.type == "tool_use"]
        assert set(call.input) == {"city"}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
        messages += [
            {"role": "assistant", "content": said.content},
            {"role": "user", "content": [result]},
        ]


def test_errors(client: Any, url: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match="messages is empty"):
        client.messages.create(**{**ASKED, "messages": []})
    with pytest.raises(anthropic.NotFoundError, match="'demo' is served here"):
        client.messages.create(**{**ASKED, "model": "nope"})
    with (
        anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.messages.create(**ASKED)


def test_async_client(url: str) -> None:
    async def use() -> None:
        async with anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0) as client:
            counted = await client.messages.count_tokens(model="demo", messages=ASKED["messages"])
            assert counted.input_tokens > 0
            assert [model.id async for model in client.models.list()] == ["demo"]
            with pytest.raises(anthropic.NotFoundError, match="batch_dir"):
                await client.messages.batches.retrieve("b")
            async with client.messages.stream(**ASKED) as stream:
                text = "".join([piece async for piece in stream.text_stream])
                assert (await stream.get_final_message()).content[0].text == text
            events = await client.messages.create(**ASKED, stream=True)
            kinds = [event.type async for event in events]
            assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")

    asyncio.run(use())
