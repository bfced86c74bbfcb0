"""Public clients of text-generation-inference against a server process with a tiny model."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import ValidationError
from openai import OpenAI, UnprocessableEntityError

from tests.checkpoints import cached_checkpoint
from tests.cli.test_native import serving

pytestmark = pytest.mark.timeout(180)

PROMPT = "hello there"
PYTHON = Path("build/text-generation-client/bin/python")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    model = str(cached_checkpoint("llama2"))
    flags = ("--model-id", model, "--max-input-tokens", "50")
    with serving("--hostname", "127.0.0.1", *flags) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> InferenceClient:
    return InferenceClient(model=url, timeout=30)


def test_text(client: InferenceClient) -> None:
    echoed = client.text_generation(PROMPT, max_new_tokens=6)
    text = client.text_generation(PROMPT, max_new_tokens=6, return_full_text=False)
    assert text
    assert echoed == PROMPT + text


def test_details(client: InferenceClient) -> None:
    result = client.text_generation(
        PROMPT,
        max_new_tokens=6,
        details=True,
        decoder_input_details=True,
        top_n_tokens=3,
        return_full_text=False,
    )
    details = result.details
    assert details is not None
    assert details.finish_reason in ("length", "eos_token")
    assert details.generated_tokens == len(details.tokens) <= 6
    assert details.prefill[0].logprob is None
    assert all(token.logprob < 0 for token in details.prefill[1:])
    for token, top in zip(details.tokens, details.top_tokens, strict=True):
        assert len(top) == 3
        assert (token.id, token.logprob) == (top[0]["id"], top[0]["logprob"])
    plain = "".join(token.text for token in details.tokens if not token.special)
    assert plain == result.generated_text


def test_stream(client: InferenceClient) -> None:
    pieces = list(client.text_generation(PROMPT, max_new_tokens=6, stream=True))
    whole = client.text_generation(PROMPT, max_new_tokens=6, return_full_text=False)
    assert "".join(pieces) == whole


def test_stream_with_details(client: InferenceClient) -> None:
    events = list(
        client.text_generation(
            PROMPT, max_new_tokens=6, stream=True, details=True, do_sample=True, seed=5
        )
    )
    assert [event.index for event in events] == list(range(1, len(events) + 1))
    *others, last = events
    assert all(event.details is None and event.generated_text is None for event in others)
    assert last.details is not None
    assert last.details.seed == 5
    assert last.details.generated_tokens == len(events)
    again = client.text_generation(PROMPT, max_new_tokens=6, do_sample=True, seed=5)
    assert last.generated_text == again


def test_best_of_and_sampling(client: InferenceClient) -> None:
    result = client.text_generation(
        PROMPT,
        max_new_tokens=4,
        best_of=2,
        do_sample=True,
        temperature=0.8,
        top_k=20,
        top_p=0.9,
        typical_p=0.95,
        repetition_penalty=1.1,
        details=True,
    )
    assert len(result.details.best_of_sequences) == 1


def test_stop(client: InferenceClient) -> None:
    text = client.text_generation(PROMPT, max_new_tokens=12, return_full_text=False)
    stop = text[2:4]
    cut = client.text_generation(PROMPT, max_new_tokens=12, return_full_text=False, stop=[stop])
    assert cut == text[: text.index(stop) + len(stop)]


@pytest.mark.parametrize("stream", [False, True])
def test_errors(client: InferenceClient, stream: bool) -> None:
    with pytest.raises(ValidationError, match="`inputs` must have less than 50 tokens"):
        list(client.text_generation("x" * 100, max_new_tokens=4, stream=stream))
    with pytest.raises(ValidationError, match="grammar is not valid"):
        list(
            client.text_generation(
                PROMPT, max_new_tokens=4, stream=stream, grammar={"type": "json", "value": "{"}
            )
        )


@pytest.mark.parametrize("stream", [False, True])
def test_grammar(client: InferenceClient, stream: bool) -> None:
    text = client.text_generation(
        PROMPT,
        max_new_tokens=40,
        temperature=1.5,
        stream=stream,
        return_full_text=False,
        grammar={"type": "regex", "value": "[a-f]{3}-[0-9]{2}"},
    )
    whole = text if isinstance(text, str) else "".join(text).removesuffix("</s>")
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", whole)


def test_async(url: str) -> None:
    async def run() -> None:
        client = AsyncInferenceClient(model=url, timeout=30)
        whole = await client.text_generation(PROMPT, max_new_tokens=6, return_full_text=False)
        stream = await client.text_generation(PROMPT, max_new_tokens=6, stream=True)
        assert "".join([piece async for piece in stream]) == whole
        await client.close()

    asyncio.run(run())


def test_chat(client: InferenceClient) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    whole = client.chat_completion(messages, max_tokens=5, temperature=0, logprobs=True)
    choice = whole.choices[0]
    assert choice.finish_reason in ("length", "stop")
    assert len(choice.logprobs.content) == whole.usage.completion_tokens
    stream = client.chat_completion(messages, max_tokens=5, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content for chunk in stream) == choice.message.content


def test_openai(url: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="-") as client:
        messages: Any = [{"role": "user", "content": PROMPT}]
        whole = client.chat.completions.create(
            model="tgi", messages=messages, max_tokens=5, temperature=0, stop="zzz"
        )
        assert whole.usage is not None
        *chunks, last = client.chat.completions.create(
            model="tgi",
            messages=messages,
            max_tokens=5,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content
        assert last.usage == whole.usage
        completion = client.completions.create(
            model="tgi", prompt=["hello", "there"], max_tokens=2, temperature=0
        )
        assert sorted(choice.index for choice in completion.choices) == [0, 1]
        assert [model.object for model in client.models.list()] == ["model"]
        with pytest.raises(UnprocessableEntityError) as caught:
            client.chat.completions.create(model="tgi", messages=messages, top_p=1.0)
        assert "`top_p` must be" in caught.value.response.json()["error"]


@pytest.mark.skipif(not PYTHON.exists(), reason="run: make text-generation-client")
def test_the_text_generation_client(url: str) -> None:
    """In a process of its own: it needs other versions of the libraries that tests use."""
    script = Path(__file__).with_name("text_generation_client.py")
    result = subprocess.run(
        [str(PYTHON), str(script), url], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["generate", "stream", "errors", "async", "chat"]
