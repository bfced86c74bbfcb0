"""The real ``openai`` client's responses against a real server process with a tiny model."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest

from lmi_core.demo import MODEL_DIR
from tests.cli.test_native import serving

pytestmark = pytest.mark.timeout(180)

KEY = "a-secret-key"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def custom(syntax: str, definition: str) -> Any:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    return {"type": "custom", "name": "code", "format": form}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(str(MODEL_DIR), "--api-key", KEY, "--served-model-name", "demo") as base:
        yield f"{base}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


def test_create(client: openai.OpenAI) -> None:
    made = client.responses.create(
        model="demo", input="hello", instructions="Be brief", max_output_tokens=8, temperature=0
    )
    assert made.status in ("completed", "incomplete")
    assert made.output_text
    assert made.usage is not None
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    with client.responses.create(
        model="demo",
        input="hello",
        instructions="Be brief",
        max_output_tokens=8,
        temperature=0,
        stream=True,
    ) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == made.output_text


def test_tools_in_a_loop(client: openai.OpenAI) -> None:
    """Three calls, each streamed and answered, the conversation kept by the server."""
    given: Any = "What is the weather?"
    previous: str | None = None
    for number in range(3):
        with client.responses.stream(
            model="demo",
            input=given,
            tools=[WEATHER],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=1.5,
            previous_response_id=previous or openai.omit,
        ) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_response()
        assert "response.function_call_arguments.done" in kinds
        assert final.status == "completed"
        [call] = final.output
        assert call.type == "function_call"
        assert set(json.loads(call.arguments)) == {"city"}
        given = [
            {"type": "function_call_output", "call_id": call.call_id, "output": f"rain {number}"}
        ]
        previous = final.id
    last = client.responses.create(
        model="demo", input=given, previous_response_id=previous, max_output_tokens=4
    )
    assert last.previous_response_id == previous


@pytest.mark.parametrize(
    ("tool", "choice"),
    [
        (custom("regex", "[a-c]{2,9}"), "required"),
        (custom("lark", "start: /[a-c]{2,9}/"), {"type": "custom", "name": "code"}),
    ],
)
def test_custom_tools(client: openai.OpenAI, tool: Any, choice: Any) -> None:
    made = client.responses.create(
        model="demo",
        input="go",
        tools=[tool],
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=1.5,
    )
    [call] = made.output
    assert call.type == "custom_tool_call"
    assert re.fullmatch("[a-c]{2,9}", call.input)
    again = client.responses.create(
        model="demo",
        input=[
            {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"},
        ],
        previous_response_id=made.id,
        max_output_tokens=4,
    )
    assert again.output_text is not None


def test_parsed_text(client: openai.OpenAI) -> None:
    Size = Annotated[int, pydantic.Field(ge=0, le=99)]

    class Thing(pydantic.BaseModel):
        name: Literal["a", "b"]
        size: Size

    parsed = client.responses.parse(model="demo", input="x", text_format=Thing, temperature=1.5)
    assert isinstance(parsed.output_parsed, Thing)


def test_stored_responses(client: openai.OpenAI) -> None:
    made = client.responses.create(model="demo", input="hello", max_output_tokens=2)
    assert client.responses.retrieve(made.id).output_text == made.output_text
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(model="demo", input="x", previous_response_id=made.id)
    assert raised.value.code == "previous_response_not_found"


def test_input_items(client: openai.OpenAI) -> None:
    """All that a response answers, call by call, whatever the order and size of pages."""
    asked = {"role": "user", "content": "Gö?"}
    call: Any = {"call_id": "c1", "name": "weather", "arguments": '{"city": "Ulm"}'}
    first = client.responses.create(
        model="demo",
        input=[
            {"role": "developer", "content": "Be brief"},
            asked,  # type: ignore[list-item]
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "H"}]},
            {"type": "function_call", **call},
            {"type": "function_call_output", "call_id": "c1", "output": "sun"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "code", "input": "x = 'é'"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
        ],
        tools=[{"type": "custom", "name": "code"}, WEATHER],
        tool_choice="none",
        max_output_tokens=3,
    )
    second = client.responses.create(
        model="demo", input="On", previous_response_id=first.id, max_output_tokens=1
    )
    items = client.responses.input_items
    listed = list(items.list(first.id, order="asc"))
    kinds = ["message", "message", "reasoning", "function_call", "function_call_output"]
    assert [item.type for item in listed] == [
        *kinds,
        "custom_tool_call",
        "custom_tool_call_output",
    ]
    assert (listed[3].arguments, listed[5].input) == (call["arguments"], "x = 'é'")  # type: ignore[union-attr]
    ids = [item.id for item in listed]
    assert len(set(ids)) == len(ids)
    assert [item.id for item in items.list(first.id, limit=2)] == ids[::-1]
    whole = [item.to_dict() for item in items.list(second.id, order="asc")]
    assert [item["type"] for item in whole[-2:]] == ["message", "message"]
    assert whole[-1]["content"] == [{"type": "input_text", "text": "On"}]
    assert whole[-2]["role"] == "assistant"
    for wrong, param in (({"limit": 0}, "limit"), ({"after": "x"}, "after")):
        with pytest.raises(openai.BadRequestError) as refused:
            items.list(first.id, **wrong)  # type: ignore[arg-type]
        assert refused.value.param == param


def test_input_tokens(client: openai.OpenAI) -> None:
    made = client.responses.create(
        model="demo", input="hello", instructions="Be brief", tools=[WEATHER], max_output_tokens=1
    )
    assert made.usage is not None
    counted = client.responses.input_tokens.count(
        model="demo", input="hello", instructions="Be brief", tools=[WEATHER]
    )
    assert counted.input_tokens == made.usage.input_tokens
    longer = client.responses.input_tokens.count(input="x", previous_response_id=made.id)
    assert longer.input_tokens > 0


def test_what_isnt_there_says_why(client: openai.OpenAI, url: str) -> None:
    made = client.responses.create(model="demo", input="hello", max_output_tokens=1)
    with pytest.raises(openai.BadRequestError, match="has ended"):
        client.responses.cancel(made.id)
    for name in ("resp_0", "../files"):
        with pytest.raises(openai.NotFoundError, match=r"resp_0|files"):
            client.responses.cancel(name)
    with pytest.raises(openai.BadRequestError, match="aren't compacted"):
        client.responses.compact(model="demo", input="x")
    with pytest.raises(openai.BadRequestError, match="isn't streamed"):
        client.responses.retrieve(made.id, stream=True)

    async def use() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as other:
            responses = other.responses
            assert (await responses.retrieve(made.id)).id == made.id
            assert [item.type async for item in responses.input_items.list(made.id)] == ["message"]
            assert (await responses.input_tokens.count(input="x")).input_tokens > 0
            with pytest.raises(openai.BadRequestError, match="has ended"):
                await responses.cancel(made.id)
            with pytest.raises(openai.BadRequestError, match="aren't compacted"):
                await responses.compact(model="demo", input="x")
            only: Any = {"structured_outputs": {"choice": ["yes"]}}
            async with responses.stream(model="demo", input="x", extra_body=only) as stream:
                final = await stream.get_final_response()
            await responses.delete(final.id)
            with pytest.raises(openai.NotFoundError):
                await responses.input_items.list(final.id)

    asyncio.run(use())


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="background is not available") as raised:
        client.responses.create(model="demo", input="x", background=True)
    assert raised.value.param == "background"
    with pytest.raises(openai.BadRequestError, match="maximum context length") as raised:
        client.responses.create(model="demo", input="x " * 200_000)
    assert raised.value.param == "input"
    schema: Any = {"type": "json_schema", "name": "n", "schema": {"type": "nonsense"}}
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(model="demo", input="x", text={"format": schema})
    assert raised.value.param == "text.format"
    wrong = custom("regex", "(")
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(model="demo", input="x", tools=[wrong], tool_choice="required")
    assert raised.value.param == "tools"


def test_async_client(url: str) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:

            async def stream() -> str:
                text = ""
                async for event in await client.responses.create(
                    model="demo", input="hi", max_output_tokens=16, temperature=0, stream=True
                ):
                    if event.type == "response.output_text.delta":
                        text += event.delta
                return text

            texts = await asyncio.gather(*(stream() for _ in range(8)))
            assert len(set(texts)) == 1
            whole = await client.responses.create(
                model="demo", input="hi", max_output_tokens=16, temperature=0
            )
            assert whole.output_text == texts[0]
            assert (await client.responses.retrieve(whole.id)).output_text == texts[0]
            [asked] = [item async for item in client.responses.input_items.list(whole.id)]
            assert asked.type == "message"
            counted = await client.responses.input_tokens.count(model="demo", input="hi")
            assert counted.input_tokens == whole.usage.input_tokens
            async with client.responses.stream(
                model="demo", input="hi", max_output_tokens=16, temperature=0
            ) as streamed:
                said = [
                    event.delta
                    async for event in streamed
                    if event.type == "response.output_text.delta"
                ]
                assert "".join(said) == texts[0]
            await client.responses.delete(whole.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(whole.id)

    asyncio.run(run())
