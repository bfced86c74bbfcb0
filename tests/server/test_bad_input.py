"""Bad input to every dialect: wrong methods and types, broken JSON."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from lmi_core.text.chat import ChatTemplate
from lmi_server.dialects.base import HttpError
from lmi_server.dialects.decode import MAX_DEPTH, MAX_MESSAGES, check_depth
from lmi_server.dialects.tgi.schema import CompatBody, GenerateBody, body_decoder
from tests.server.harness import Answer, serving

TEMPLATE = ChatTemplate({"default": "{{ messages | length }}"})
LMI = ("/invocations", "/predictions/model", "/lmi/invocations")
OPENAI = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/openai/v1/completions")
OPENAI_TOKENS = ("/detokenize",)
TGI = ("/generate", "/generate_stream", "/", "/tgi/invocations", "/tgi/v1/chat/completions")
TGI_TOKENS = ("/chat_tokenize", "/tgi/tokenize")
JSON = {"Content-Type": "application/json"}


def check_form(path: str, answer: Answer) -> None:
    """The error has the form of the path's dialect."""
    if path in LMI:
        error = json.loads(answer.body)
        assert set(error) in ({"code", "error"}, {"code", "type", "message"})
        assert error["code"] == answer.status
        assert answer.headers["Pragma"] == "no-cache"
    elif path in (*OPENAI, *OPENAI_TOKENS):
        error = json.loads(answer.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
    else:
        assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"


def ask(path: str, body: bytes, headers: dict[str, str] = JSON) -> Answer:
    async def run() -> Answer:
        async with serving(chat_template=TEMPLATE) as served:
            answer = await served.post(body, path, headers=headers)
            assert (await served.post({"inputs": "x"})).status == 200
            return answer

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "messages"),
        ("/invocations", "messages"),
        ("/v1/messages", "messages"),
        ("/v1/responses", "input"),
        ("/tgi/v1/chat/completions", "messages"),
    ],
)
def test_too_many_messages(path: str, name: str) -> None:
    """Each would cost its own time in the chat template."""

    def body(number: int) -> bytes:
        messages: list[dict[str, str]] = [{}] * number
        return json.dumps({name: messages, "max_tokens": 1, "model": "model"}).encode()

    answer = ask(path, body(MAX_MESSAGES + 1))
    assert answer.status in (400, 422, 424), answer.body
    assert name in answer.body.decode()
    assert str(MAX_MESSAGES) in answer.body.decode()


@pytest.mark.parametrize(
    ("path", "name"), [("/invocations", "inputs"), ("/v1/completions", "prompt")]
)
def test_the_last_of_two_fields_of_a_name_counts(path: str, name: str) -> None:
    async def run() -> None:
        async with serving() as served:
            body = f'{{"{name}": "first", "max_tokens": 1, "{name}": "last"}}'.encode()
            assert (await served.post(body, path, headers=JSON)).status == 200
            assert served.engine.requests[-1].prompt == "last"

    asyncio.run(run())


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "HEAD"])
@pytest.mark.parametrize("path", [*OPENAI, *OPENAI_TOKENS, *TGI, *TGI_TOKENS])
def test_wrong_methods(path: str, method: str) -> None:
    if path == "/" and method in ("GET", "HEAD"):
        return  # TGI's health

    async def run() -> None:
        async with serving() as served, served.client.request(method, path) as response:
            assert response.status == 405
            assert "POST" in response.headers["Allow"]
            answer = Answer(405, response.headers, await response.read())
            if method == "HEAD":
                assert answer.body == b""
            elif path in (*TGI, *TGI_TOKENS):
                assert answer.body == b""
                check_form(path, answer)
            else:
                check_form(path, answer)

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/info", "/", "/ping"])
def test_head_answers_where_get_does(path: str) -> None:
    async def run() -> None:
        async with serving() as served, served.client.head(path) as response:
            assert (response.status, await response.read()) == (200, b"")

    if path != "/info":  # needs more of an engine
        asyncio.run(run())


@pytest.mark.parametrize("path", [*OPENAI, *OPENAI_TOKENS, *TGI, *TGI_TOKENS])
@pytest.mark.parametrize("content_type", ["text/plain", "image/png", "multipart/form-data; b=x"])
def test_wrong_content_types(path: str, content_type: str) -> None:
    answer = ask(path, b"{}", {"Content-Type": content_type})
    assert answer.status == 415
    check_form(path, answer)


def test_lmi_has_no_415() -> None:
    """Its handlers decode what they can, and fail in their own way."""
    answer = ask("/invocations", b"\x89PNG", {"Content-Type": "image/png"})
    assert (answer.status, json.loads(answer.body)["code"]) == (424, 424)


DEEP = b'{"inputs": "a", "x": ' + b"[" * 64 + b"]" * 64 + b"}"
MALFORMED = [
    b"",
    b"{",
    b'{"inputs": "a"',
    b'{"inputs": "a',
    b"{}}",
    b"nonsense",
    b'{"inputs": NaN}',
    b'{"inputs": "a", "parameters": {"temperature": Infinity}}',
    b'{"inputs": "a", "parameters": {"temperature": -Infinity}}',
    b'{"inputs": "\\ud800"}',
    b'{"inputs": "\\ud800x", "prompt": "\\ud800x"}',
    b'{"inputs": "\\udc00", "prompt": "\\udc00"}',
    b'{"inputs": "\xed\xa0\x80", "prompt": "\xed\xa0\x80"}',
    b'{"inputs": "\xff", "prompt": "\xff"}',
    DEEP,
    b"[" * 100_000,
    b'{"x":' * 100_000,
]


@pytest.mark.parametrize("body", MALFORMED, ids=lambda body: repr(body[:24]))
@pytest.mark.parametrize("path", [LMI[0], *OPENAI[:3], *OPENAI_TOKENS, *TGI, *TGI_TOKENS])
def test_malformed_json(path: str, body: bytes) -> None:
    answer = ask(path, body)
    # What comes before the fault may already be of the wrong shape.
    assert answer.status in ((424,) if path in LMI else (400,) if path in OPENAI else (400, 422))
    check_form(path, answer)


def test_a_string_that_nobody_reads_is_not_utf8() -> None:
    body = b'{"prompt": "x", "max_tokens": 1, "stream": true, "stream_options": {"x": "\xd2"}}'
    answer = ask("/v1/completions", body)
    assert answer.status == 400
    assert "not valid UTF-8: byte 74 is invalid" in answer.body.decode()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"inputs": "\\ud800"}', "lone surrogate \\ud800 (byte 12)"),
        (b'{"inputs": "a\\\\b\\ud83d\\ude00", "x": "\\uDBFFx"}', "lone surrogate \\uDBFF"),
        (DEEP, "nested too deeply, at most 64 levels are allowed"),
        (b'{"inputs": "a', "Input data was truncated"),
        (b"\xef\xbb\xbf{}", "invalid character (byte 0)"),
    ],
)
def test_malformed_json_says_why(body: bytes, reason: str) -> None:
    assert reason in json.loads(ask("/invocations", body).body)["error"]


def test_depth_counts_brackets_outside_strings() -> None:
    deepest = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    for body in (
        deepest,
        b"[" + b",".join([deepest[1:-1]] * 3) + b"]",
        b'{"a": "' + b"[{" * 100 + b'"}',
        b'{"a": "\\"' + b"[" * 100 + b'"}',
        b'["\\\\", "' + b"[" * 100 + b'"]',
    ):
        check_depth(body)
        json.loads(body)
    for body in (b"[" + deepest + b"]", b'["\\\\"' + deepest, b'{"":' * (MAX_DEPTH + 1)):
        with pytest.raises(RecursionError):
            check_depth(body)


def test_depth_is_checked_in_linear_time() -> None:
    body = b"[]" * 65 + b'"' + b'\\"' * 2_000_000
    started = time.thread_time()
    check_depth(body)
    assert time.thread_time() - started < 2


def test_duplicate_keys_by_dialect() -> None:
    """Python's decoder takes the last; TGI's refuses."""
    body = b'{"inputs": "a b", "inputs": "c", "parameters": {"max_new_tokens": 1}}'
    assert ask("/invocations", body).status == 200
    assert ask("/v1/completions", b'{"prompt": "", "prompt": "a", "max_tokens": 1}').status == 200
    answer = ask("/generate", body)
    assert answer.status == 422
    assert answer.body == (
        b"Failed to deserialize the JSON body into the target type: duplicate field `inputs`"
    )


@pytest.mark.parametrize(
    ("body", "is_refused"),
    [
        (b'{"inputs": "a", "parameters": {"seed": 1, "seed": 2}}', True),
        (b'{"inputs": "a", "parameters": {}, "parameters": {}}', True),
        (b'{"inputs": "a", "x": {"inputs": 1, "inputs": 2}}', False),
        (b'{"inputs": "a", "x": 1, "x": 2}', False),
        (b'{"inputs": "a", "x": 1' + b"0" * 9000 + b', "y": "inputs"}', False),
        (b'{"inputs": "\\"inputs\\": \\"inputs\\""}', False),
        (b'{"inputs": "inputs"}', False),
    ],
)
def test_duplicate_fields_of_tgi(body: bytes, is_refused: bool) -> None:
    for kind in (GenerateBody, CompatBody):
        if is_refused:
            with pytest.raises(HttpError, match="duplicate field"):
                body_decoder(kind)(body)
        else:
            body_decoder(kind)(body)


@pytest.mark.parametrize("path", [LMI[0], *OPENAI[:2], *TGI[:3]])
def test_enormous_bodies(path: str) -> None:
    async def run() -> None:
        async with serving(max_request_bytes=1000) as served:
            answer = await served.post(b" " * 1001, path, headers=JSON)
            assert answer.status == 413
            if path in LMI:
                assert answer.body == b""
            else:
                check_form(path, answer)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/predictions/other", {"inputs": "x"}, 404),
        ("/predictions/model/7", {"inputs": "x"}, 404),
        ("/invocations", {"inputs": "x", "adapters": "fr"}, 424),
        ("/v1/completions", {"model": "other", "prompt": "x"}, 404),
        ("/v1/chat/completions", {"model": "other", "messages": [{}]}, 404),
        ("/tokenize", {"model": "other", "prompt": "x"}, 404),
        ("/v1/models/other", None, 404),
    ],
)
def test_unknown_models_versions_and_adapters(path: str, body: Any, status: int) -> None:
    async def run() -> None:
        async with serving(chat_template=TEMPLATE) as served:
            method = "GET" if body is None else "POST"
            async with served.client.request(method, path, json=body) as response:
                assert response.status == status
                assert "other" in (text := await response.text()) or "7" in text or "fr" in text

    asyncio.run(run())
