"""What OpenAI's routes refuse and how failures look."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from lmi_core.errors import UserError
from lmi_core.text.chat import ChatTemplate
from lmi_server.http.metrics import Metrics
from tests.engine.harness import make_engine
from tests.server.dialects.lmi.test_lmi_formats import render
from tests.server.dialects.openai.test_openai_formats import CHAT, TEXT, parse
from tests.server.fake_engine import FakeEngine
from tests.server.harness import serving, serving_backend

REFUSED = {
    "watermark": True,
    "logits_processors": ["x"],
}


@pytest.mark.parametrize("body", [TEXT, CHAT])
@pytest.mark.parametrize("name", REFUSED)
def test_parameters_without_a_mechanism_are_refused(body: dict[str, Any], name: str) -> None:
    with pytest.raises(UserError, match="not available in this version") as raised:
        parse({**body, name: REFUSED[name]})
    assert raised.value.field == name


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"response_format": {"type": "xml"}}, "must be text, json_object, json_schema or"),
        ({"response_format": {"type": "json_schema"}}, "needs a name and a schema"),
        ({"guided_json": 3}, "guided_json must be a schema"),
        ({"guided_choice": []}, "guided_choice must be a list of strings, at least one"),
        ({"guided_choice": ["a", 1]}, "guided_choice must be a list of strings"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs isn't JSON"),
        ({"structured_outputs": {"what": "x"}}, "structured_outputs.what is not available"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_json and guided_regex exclude"),
        ({"guided_regex": "a" * 300_000}, "guided_regex has 300000 characters"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bad_grammars(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as raised:
        parse({**TEXT, **asked})
    assert raised.value.field in asked


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": ["a", 1]}, r"prompt\[1\] is a token id among prompts"),
        ({"prompt": [[]]}, r"prompt\[0\] is an empty list"),
        ({"prompt": [-1]}, "negative"),
        ({"prompt": ["a"] * 1025}, "1025 prompts"),
        ({"prompt": "a", "max_tokens": 0}, "at least 1, got 0 without echo"),
        ({"prompt": "a", "seed": "x"}, "seed must be int"),
        ({"messages": []}, "messages is empty"),
        ({**CHAT, "top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({**CHAT, "max_tokens": 0}, "^max_tokens must be at least 1, got 0"),
        ({**CHAT, "max_completion_tokens": 0}, "^max_completion_tokens must be at least 1, got 0"),
        ({**CHAT, "audio": {"voice": "x"}}, "audio is not available"),
        ({**CHAT, "modalities": ["audio"]}, "modalities other than text are not available"),
        ({**CHAT, "chat_template": "x"}, "chat_template is not available"),
        (
            {**TEXT, "best_of": 2, "stream": True},
            "best_of is 2 and n is 1; the best are known",
        ),
        ({**CHAT, "best_of": 2}, "best_of is 2 and n is 1; only completions choose the best"),
        ({**CHAT, "functions": [{}]}, "functions are not available"),
        ({**CHAT, "tools": [{}]}, r"tools\[0\] must be"),
    ],
)
def test_bad_bodies(body: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse(body)


def test_error_in_mid_stream_is_an_event() -> None:
    data = render(parse({**CHAT, "stream": True}), FakeEngine(fail_after=1))
    last = data.split(b"\n\n")[-2]
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert (error["type"], error["message"]) == ("server_error", "step 7 failed: no such kernel")
    assert b"[DONE]" not in data


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "message"),
    [
        ("POST", "/v1/completions", b"{", {}, 400, "not valid JSON"),
        ("POST", "/v1/completions", b"{}", {}, 400, "prompt"),
        ("POST", "/v1/completions", b"[]", {}, 400, "the body must be object, got array"),
        ("POST", "/v1/chat/completions", b"{}", {}, 400, "messages"),
        ("POST", "/v1/completions", b"x=1", {"Content-Type": "text/plain"}, 415, "text/plain"),
        ("GET", "/v1/completions", None, {}, 405, "allowed are POST"),
        ("POST", "/v1/moderations", b"{}", {}, 404, "not a route"),
        ("POST", "/v1/embeddings", b"{}", {}, 400, "input"),
        ("POST", "/tokenize", b"{}", {}, 400, "prompt"),
        ("POST", "/detokenize", b'{"tokens": [5000]}', {}, 400, "token id"),
        ("POST", "/tokenize", b'{"prompt": "x", "model": "y"}', {}, 404, "'y' does not exist"),
    ],
)
def test_http_errors(
    method: str, path: str, body: Any, headers: dict[str, str], status: int, message: str
) -> None:
    async def run() -> None:
        headers.setdefault("Content-Type", "application/json")
        async with (
            serving() as served,
            served.client.request(method, path, data=body, headers=headers) as response,
        ):
            assert response.status == status
            error = json.loads(await response.read())["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert message in error["message"]
            assert error["param"] is None or error["param"] in {"tokens", "prompt", "model"}

    asyncio.run(run())


LONG_CHAT = [{"role": "user", "content": "x" * 300}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x" * 300}, "prompt"),
        ("/v1/completions", {"prompt": [1] * 300, "stream": True}, "prompt"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x" * 300}]},
            "messages",
        ),
    ],
)
def test_prompts_beyond_the_context(path: str, body: dict[str, Any], param: str) -> None:
    """Clients fall back to other models by the code or by these words."""

    async def run() -> None:
        template = ChatTemplate({"default": "{{ messages[0].content }}"})
        async with (
            make_engine() as engine,
            serving_backend(engine, Metrics(), chat_template=template) as served,
        ):
            answer = await served.post(body, path)
        error = json.loads(answer.body)["error"]
        assert answer.status == 400
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert "maximum context length is 256 tokens" in error["message"]
        assert "300 tokens" in error["message"]

    asyncio.run(run())


def test_full_server_is_429() -> None:
    async def run() -> None:
        async with serving(FakeEngine(max_running=0)) as served:
            answer = await served.post({"prompt": "x"}, "/v1/completions")
            assert (answer.status, answer.headers["Retry-After"]) == (429, "2")
            assert json.loads(answer.body)["error"]["type"] == "rate_limit_error"

    asyncio.run(run())


def test_one_failing_prompt_ends_the_stream_and_its_siblings() -> None:
    async def run() -> None:
        engine = FakeEngine(fail_after=2, delay_s=0.001)
        async with serving(engine) as served:
            asked = {"prompt": ["a", "b", "c"], "max_tokens": 9, "stream": True}
            answer = await served.post(asked, "/v1/completions")
            assert answer.status == 200
            last = json.loads(answer.body.split(b"\n\n")[-2].removeprefix(b"data: "))
            assert last["error"]["message"] == "step 7 failed: no such kernel"
            assert not engine.running
            long = {**asked, "prompt": ["a", "b " * 5000]}
            assert (await served.post(long, "/v1/completions")).status == 400

    asyncio.run(run())
