"""The real ``openai`` client against a real server process with a tiny random model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest

from lmi_core.demo import MODEL_DIR
from lmi_core.text.tokenizer import Tokenizer
from tests.checkpoints import cached_checkpoint
from tests.cli.test_native import serving

pytestmark = pytest.mark.timeout(180)

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
KEY = "a-secret-key"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    model = str(cached_checkpoint("llama2"))
    with serving(model, "--api-key", KEY, "--served-model-name", "tiny") as base:
        yield f"{base}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object) == ("tiny", "model")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'other' does not exist; 'tiny' is served"):
        client.models.retrieve("other")


@pytest.mark.parametrize("name", ["tgi", "dummy"])
def test_what_clients_of_tgi_call_any_model(client: openai.OpenAI, name: str) -> None:
    """text-generation and its documentation, and huggingface_hub's InferenceClient."""
    answer = client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=8, temperature=0
    )
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("length", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def test_streamed_chat_equals_the_whole_one(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 24,
        "seed": 5,
        "n": 2,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**asked)
    texts, reasons, roles, usage = ["", ""], ["", ""], [0, 0], None
    with client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                reasons[choice.index] += choice.finish_reason or ""
                roles[choice.index] += choice.delta.role == "assistant"
            usage = chunk.usage
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]
    assert reasons == ["length", "length"]
    assert roles == [1, 1]
    assert usage is not None
    assert usage.completion_tokens == 48


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=3, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 4
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob <= 0
        assert entry.bytes == list(entry.token.encode())


def test_cached_tokens_are_reported(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "a long prompt " * 12, "max_tokens": 1}
    client.completions.create(**asked)
    usage = client.completions.create(**asked).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens >= 32


def test_completion_of_several_prompts(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "prompt": ["hello", "world", "third"],
        "n": 2,
        "seed": 1,
        "max_tokens": 12,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 72
    texts = [""] * 6
    with client.completions.create(**asked, stream=True) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_echo_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="hello", max_tokens=3, echo=True, logprobs=2, temperature=0
    )
    [choice] = answer.choices
    assert choice.text.startswith("hello")
    logprobs = choice.logprobs
    assert logprobs is not None
    assert answer.usage is not None
    num_tokens = answer.usage.prompt_tokens + 3
    assert len(logprobs.tokens or ()) == len(logprobs.text_offset or ()) == num_tokens
    values = logprobs.token_logprobs or []
    assert values[0] is None
    assert all(value <= 0 for value in values[1:])


def test_scoring_a_prompt_generates_nothing(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="hello", max_tokens=0, echo=True, logprobs=0
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hello", "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.tokens or ()) == answer.usage.prompt_tokens


def test_prompt_of_token_ids(client: openai.OpenAI, url: str) -> None:
    root = url.removesuffix("/v1")
    tokens: Any = client.post(f"{root}/tokenize", cast_to=object, body={"prompt": "hello"})
    ids = tokens["tokens"]
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "temperature": 0}
    by_ids = client.completions.create(prompt=ids, **asked)
    by_text = client.completions.create(prompt="hello", **asked)
    assert by_ids.choices[0].text == by_text.choices[0].text
    text: Any = client.post(f"{root}/detokenize", cast_to=object, body={"tokens": ids})
    assert "hello" in text["prompt"]


def mean_logprob(choice: openai.types.CompletionChoice) -> float:
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    logprobs = [logprob or 0.0 for logprob in choice.logprobs.token_logprobs]
    return sum(logprobs) / len(logprobs)


def test_best_of_is_the_likeliest_per_token_of_the_same_samples(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 6, "seed": 3}
    every = client.completions.create(**asked, n=5, logprobs=0).choices
    best = client.completions.create(**asked, n=2, best_of=5)
    ranked = sorted(every, key=mean_logprob, reverse=True)
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert len({choice.text for choice in every}) == 5
    assert best.usage is not None
    assert best.usage.completion_tokens == sum(
        len(choice.logprobs.tokens or ()) for choice in every if choice.logprobs
    )


def test_logit_bias_and_stop(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0}
    forced = client.completions.create(**asked, logit_bias={"104": 100})
    assert len(set(forced.choices[0].text)) == 1
    stopped = client.completions.create(
        **asked, logit_bias={"104": 100}, stop=[forced.choices[0].text[:2]]
    )
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("", "stop")


@pytest.mark.parametrize(
    ("asked", "field", "words"),
    [
        ({"temperature": 3}, "temperature", "between 0 and 2, got 3"),
        ({"n": 0}, "n", "between 1 and 128"),
        ({"max_tokens": -1}, "max_tokens", "at least 0"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"extra_body": {"min_tokens": 3}}, "min_tokens", "min_tokens must be between 0 and 2"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "logit_bias are out of vocabulary"),
        ({"stop": [""]}, "stop", "empty string"),
        ({"best_of": 4, "n": 5}, "best_of", "best_of must be between 5 and 128, got 4"),
        ({"extra_body": {"num_beams": 4}, "stop": ["x"]}, "stop", "beam search has no stop"),
        ({"suffix": "x"}, "suffix", "no tokens for that"),
        ({"prompt": "x" * 5000}, "prompt", "maximum context length is"),
        ({"prompt": []}, "prompt", "must be provided and non-empty"),
        ({"extra_body": {"prompt": 7}}, "prompt", "must be"),
        ({"extra_body": {"stream_options": {}}}, "stream_options", "stream: true"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests(
    client: openai.OpenAI, stream: bool, asked: dict[str, Any], field: str, words: str
) -> None:
    if stream and field == "stream_options":
        return
    asked = {"model": "tiny", "prompt": "x", "max_tokens": 2, "stream": stream, **asked}
    with pytest.raises(openai.BadRequestError, match=words) as raised:
        client.completions.create(**asked)
    assert raised.value.type == "invalid_request_error"
    assert raised.value.param == field


def test_wrong_model_and_wrong_key(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-4' does not exist; 'tiny' is") as raised:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert raised.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError) as refused:
        client.with_options(api_key="wrong").models.list()
    assert refused.value.code == "invalid_api_key"


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 5},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
]


@pytest.fixture(scope="module")
def demo() -> Iterator[openai.OpenAI]:
    flags = ("--api-key", KEY, "--served-model-name", "demo")
    with (
        serving(str(MODEL_DIR), *flags) as base,
        openai.OpenAI(base_url=f"{base}/v1", api_key=KEY, max_retries=0) as client,
    ):
        yield client


def test_tools(demo: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 1.5,
        "seed": 3,
    }
    [choice] = demo.chat.completions.create(**asked).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "weather"
    assert set(json.loads(call.function.arguments)) == {"city", "days"}

    with demo.chat.completions.stream(**asked) as stream:
        events = list(stream)
        [streamed] = stream.get_final_completion().choices
    assert any(event.type == "tool_calls.function.arguments.delta" for event in events)
    assert streamed.finish_reason == "tool_calls"
    assert streamed.message.tool_calls is not None
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments

    answer = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    history = [*MESSAGES, choice.message.model_dump(exclude_none=True), answer]
    again = demo.chat.completions.create(
        **{**asked, "messages": history, "tool_choice": "auto"}, max_tokens=4
    )
    assert again.choices[0].finish_reason in ("length", "stop")


def test_structured_output(demo: openai.OpenAI) -> None:
    Size = Annotated[int, pydantic.Field(ge=0, le=99)]

    class Thing(pydantic.BaseModel):
        name: Literal["a", "b"]
        sizes: Annotated[list[Size], pydantic.Field(min_length=1, max_length=3)]

    parsed = demo.chat.completions.parse(
        model="demo", messages=MESSAGES, response_format=Thing, temperature=1.5, seed=1
    )
    thing = parsed.choices[0].message.parsed
    assert isinstance(thing, Thing)

    # With tools, too, an answer is one of both, streamed as it is whole.
    Short = Annotated[str, pydantic.Field(max_length=5)]

    class Weather(pydantic.BaseModel):
        city: Short

    [brace], [mark] = (
        Tokenizer.load(MODEL_DIR).encode_now(char, add_special_tokens=False) for char in "{<"
    )
    for seed in range(4):
        asked: dict[str, Any] = {
            "model": "demo",
            "messages": MESSAGES,
            "response_format": Thing,
            "tools": [openai.pydantic_function_tool(Weather)],
            "parallel_tool_calls": False,
            "temperature": 1.5,
            "seed": seed,
            "logit_bias": {str(mark if seed % 2 else brace): 90},
        }
        said = demo.chat.completions.parse(**asked).choices[0].message
        with demo.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion().choices[0].message
        assert (streamed.content, streamed.parsed) == (said.content, said.parsed)
        if seed % 2:
            assert said.tool_calls is not None
            [call] = said.tool_calls
            assert isinstance(call.function.parsed_arguments, Weather)
            assert streamed.tool_calls[0].function.arguments == call.function.arguments
        else:
            assert isinstance(said.parsed, Thing)


def test_async_client(url: str) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:

            async def stream(number: int) -> str:
                text = ""
                async with await client.chat.completions.create(
                    model="tiny",
                    messages=MESSAGES,
                    max_tokens=16,
                    temperature=0,
                    stream=True,
                    user=f"user-{number}",
                    extra_body={"ignore_eos": True},
                ) as chunks:
                    async for chunk in chunks:
                        text += chunk.choices[0].delta.content or ""
                return text

            texts = await asyncio.gather(*(stream(number) for number in range(8)))
            assert len(set(texts)) == 1
            # A reader that leaves early ends its request; the server must still serve others.
            leaving = await client.completions.create(
                model="tiny", prompt="x", max_tokens=400, stream=True
            )
            await anext(aiter(leaving))
            await leaving.close()
            assert await stream(9) == texts[0]

    asyncio.run(run())


def test_beams_come_in_the_order_of_their_scores(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 6, "logprobs": 0}
    beams = client.completions.create(**asked, n=2, best_of=4, extra_body={"use_beam_search": True})
    scores = [mean_logprob(choice) for choice in beams.choices]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)
    greedy = client.completions.create(**asked, temperature=0).choices[0]
    assert scores[0] >= mean_logprob(greedy) - 1e-6
