"""Parameters whose mechanism isn't there: range-checked and refused in each protocol's form.

Speculation is no parameter of a request; ``tests/config`` has its options.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from lmi_core.text.chat import ChatTemplate
from tests.server.dialects.tgi.test_tgi_http import serving as serving_tgi
from tests.server.harness import Answer, serving

TEMPLATE = ChatTemplate({"default": "{{ messages | length }}"})
MISSING = "not available in this version"


def ask(path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Answer:
    async def run() -> Answer:
        async with serving(chat_template=TEMPLATE) as served:
            answer = await served.post(body, path, headers=headers)
            assert not served.engine.requests
            return answer

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            {"parameters": {"spaces_between_special_tokens": False}},
            f"parameters.spaces_between_special_tokens is {MISSING} (got False)",
        ),
        ({"parameters": {"typical_p": 0}}, "typical_p must be above 0 and at most 1, got 0"),
        ({"parameters": {"num_beams": 0}}, "parameters.num_beams must be at least 1, got 0"),
        ({"parameters": {"best_of": 2, "n": 3}}, "best_of must be between n (3) and 128, got 2"),
        ({"parameters": {"best_of": 0}}, "parameters.best_of must be at least 1, got 0"),
        ({"adapters": "fr"}, "'fr', but LoRA is not enabled; set option.enable_lora=true"),
        ({"adapters": ["fr", ""]}, "Number of adapters is not equal to the number of inputs"),
    ],
)
def test_lmi(body: dict[str, Any], text: str) -> None:
    answer = ask("/invocations", {"inputs": "x", **body})
    error = json.loads(answer.body)
    assert (answer.status, error["code"]) == (424, 424)
    assert text in error["error"]


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Amzn-SageMaker-Adapter-Identifier": "fr"},
        {"adapter": "fr"},
        {"X-Amzn-SageMaker-Custom-Attributes": "adapter=fr"},
    ],
)
def test_adapters_in_headers(headers: dict[str, str]) -> None:
    answer = ask("/invocations", {"inputs": "x"}, headers)
    assert answer.status == 424
    assert b"adapter 'fr'" in answer.body


def test_the_base_model_may_be_named_as_an_adapter() -> None:
    async def run() -> None:
        async with serving() as served:
            for adapters in ("", [""], []):
                answer = await served.post({"inputs": "x", "adapters": adapters})
                assert answer.status == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"typical_p": 1.5}, "`typical_p` must be > 0.0 and < 1.0"),
        ({"best_of": 9, "do_sample": True}, "`best_of` must be > 0 and <= 2. Given: 9"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_tgi(parameters: dict[str, Any], text: str, stream: bool) -> None:
    async def run() -> None:
        async with serving_tgi() as served:
            path = "/generate_stream" if stream else "/generate"
            answer = await served.post({"inputs": "x", "parameters": parameters}, path)
            error = json.loads(answer.body.removeprefix(b"data:"))
            assert answer.status == (200 if stream else 422)
            assert error["error_type"] == "validation"
            if stream and "best_of" in parameters:
                assert "not supported when streaming" in error["error"]
            else:
                assert error["error"] == f"Input validation error: {text}"

    asyncio.run(run())


def test_tgi_answers_with_the_base_model_for_any_adapter() -> None:
    """By TGI's rule; the log says so."""

    async def run() -> None:
        async with serving_tgi() as served:
            body = {"inputs": "x", "parameters": {"adapter_id": "fr", "max_new_tokens": 1}}
            assert (await served.post(body, "/generate")).status == 200

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"watermark": True}, "watermark", f"watermark is {MISSING}"),
        ({"logits_processors": ["x"]}, "logits_processors", f"logits_processors are {MISSING}"),
        ({"num_beams": 0}, "num_beams", "num_beams must be at least 1, got 0"),
        ({"best_of": 0}, "best_of", "best_of must be between 1 and 128, got 0"),
        ({"best_of": 2, "n": 3}, "best_of", "best_of must be between 3 and 128, got 2"),
        ({"adapter_id": "fr"}, "adapter_id", "name the adapter in model"),
    ],
)
def test_openai(path: str, fields: dict[str, Any], param: str, text: str) -> None:
    body = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{}]}
    answer = ask(path, {**body, **fields})
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param
    assert text in error["message"]


def test_openai_predictions_are_hints() -> None:
    """They make tokens come sooner, not other ones, so that ignoring them is right."""

    async def run() -> None:
        async with serving() as served:
            body = {"prompt": "x", "prediction": {"type": "content", "content": "a fox"}}
            assert (await served.post(body, "/v1/completions")).status == 200

    asyncio.run(run())
