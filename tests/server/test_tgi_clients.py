"""Public clients of text-generation-inference against a server process with a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import ValidationError

from tests.checkpoints import cached_checkpoint
from tests.cli.test_native import serving

pytestmark = pytest.mark.timeout(180)

PROMPT = "hello there"


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
    with pytest.raises(ValidationError, match="grammar is not supported"):
        list(
            client.text_generation(
                PROMPT, max_new_tokens=4, stream=stream, grammar={"type": "regex", "value": "a"}
            )
        )


def test_async(url: str) -> None:
    async def run() -> None:
        client = AsyncInferenceClient(model=url, timeout=30)
        whole = await client.text_generation(PROMPT, max_new_tokens=6, return_full_text=False)
        stream = await client.text_generation(PROMPT, max_new_tokens=6, stream=True)
        assert "".join([piece async for piece in stream]) == whole
        await client.close()

    asyncio.run(run())
