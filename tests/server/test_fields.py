"""Every field of every body with values of every type: refused by name, or served."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from lmi_core.text.chat import ChatTemplate
from lmi_server.dialects.lmi.schema import LmiBody, LmiParameters
from lmi_server.dialects.openai.chat_schema import ChatBody
from lmi_server.dialects.openai.completion_schema import CompletionBody
from lmi_server.dialects.openai.token_routes import DetokenizeBody, TokenizeBody
from lmi_server.dialects.tgi.options import TgiOptions
from lmi_server.dialects.tgi.schema import CompatBody, GenerateParameters
from lmi_server.dialects.tgi.v1_schema import ChatBody as TgiChatBody
from lmi_server.dialects.tgi.v1_schema import CompletionBody as TgiCompletionBody
from lmi_server.dialects.unknown_fields import IGNORED_HEADER
from tests.engine.fake_runner import FakeRunner
from tests.server.configured import configured
from tests.server.dialects.tgi.test_tgi_http import serving

TEMPLATE = ChatTemplate({"default": "{% for m in messages %}{{ m.content }}{% endfor %}"})
VALUES: tuple[Any, ...] = (
    None, True, "x", -1, 0, 1.5, -1e300, 2**64, [], [None], ["x"], {"a": [1]},
)  # fmt: skip
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
INPUTS = {"inputs": "x", "parameters": {"max_new_tokens": 2}}
BODIES: list[tuple[str, type, str | None, dict[str, Any], int]] = [
    ("/invocations", LmiBody, None, INPUTS, 424),
    ("/invocations", LmiParameters, "parameters", INPUTS, 424),
    ("/v1/completions", CompletionBody, None, {"prompt": "x", "max_tokens": 2}, 400),
    ("/v1/chat/completions", ChatBody, None, CHAT, 400),
    ("/tokenize", TokenizeBody, None, {"prompt": "x"}, 400),
    ("/detokenize", DetokenizeBody, None, {"tokens": [1]}, 400),
    ("/", CompatBody, None, INPUTS, 422),
    ("/generate", GenerateParameters, "parameters", INPUTS, 422),
    ("/tgi/v1/chat/completions", TgiChatBody, None, CHAT, 422),
    ("/tgi/v1/completions", TgiCompletionBody, None, {"prompt": "x", "max_tokens": 2}, 422),
]


def fits(kind: Any, value: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


@pytest.mark.parametrize(
    ("path", "schema", "where", "valid", "status"), BODIES, ids=lambda value: str(value)[:40]
)
def test_values_of_every_type(
    path: str, schema: type, where: str | None, valid: dict[str, Any], status: int
) -> None:
    async def run() -> None:
        options: dict[str, Any] = {"tgi": TgiOptions(), "chat_template": TEMPLATE}
        async with serving(FakeRunner(max_model_len=32), api="lmi", **options) as served:
            for field in msgspec.structs.fields(schema):
                for value in VALUES:
                    body = json.loads(json.dumps(valid))
                    (body if where is None else body[where])[field.name] = value
                    answer = await served.post(body, path)
                    case = (field.name, value, answer.status, answer.body[:300])
                    assert answer.status in (200, status, 404 if field.name == "model" else 200), (
                        case
                    )
                    is_absent = value is None and where == "parameters" and schema is LmiParameters
                    if not fits(field.type, value) and not is_absent:
                        assert answer.status == status, case
                        assert field.name.encode() in answer.body, case
            assert (await served.post(valid, path)).status == 200

    asyncio.run(run())


RESPONSE_FORMAT = {"type": "text", "scheme": {}}
STREAMED = {"stream": True, "stream_options": {"include_usage": True, "usage": True}}
MESSAGES = {**CHAT, "model": "model"}
NESTED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "x", "max_tokens": 2}, STREAMED, "stream_options.usage"),
    ("/v1/chat/completions", CHAT, STREAMED, "stream_options.usage"),
    ("/v1/chat/completions", CHAT, {"response_format": RESPONSE_FORMAT}, "response_format.scheme"),
    ("/invocations", CHAT, STREAMED, "stream_options.usage"),
    ("/invocations", {"prompt": "x"}, STREAMED, "stream_options.usage"),
    (
        "/invocations",
        {"inputs": "x"},
        {"parameters": {"response_format": RESPONSE_FORMAT}},
        "response_format.scheme",
    ),
    ("/tgi/v1/chat/completions", CHAT, STREAMED, "stream_options.usage"),
    (
        "/v1/messages",
        MESSAGES,
        {
            "tools": [{"name": "f", "input_schema": {}, "examples": []}],
            "tool_choice": {"type": "none", "tool": "f"},
        },
        "tool_choice.tool, tools.examples",
    ),
    ("/v1/messages", MESSAGES, {"thinking": {"type": "disabled", "tokens": 1}}, "thinking.tokens"),
    (
        "/v1/messages/count_tokens",
        {"model": "model", "messages": CHAT["messages"]},
        {"tokens": 1},
        "tokens",
    ),
    (
        "/v1/responses",
        {"model": "model", "input": "x", "store": False},
        {"text": {"format": {"type": "text", "json": 1}}, "reasoning": {"efort": "low"}},
        "reasoning.efort, text.format.json",
    ),
    (
        "/v1/messages",
        MESSAGES,
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "x", "name": "y"}]},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": {}}}],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "1",
                            "error": True,
                            "content": [{"type": "text", "text": "x", "note": 1}],
                        },
                        {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}},
                    ],
                },
            ],
            "system": [{"type": "text", "text": "x", "priority": 1}],
        },
        "messages.content.content.note, messages.content.error, messages.content.name, "
        "system.priority",
    ),
    (
        "/v1/responses",
        {"model": "model", "input": "x", "store": False},
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "x", "lang": "en"}]},
                {"type": "reasoning", "id": "r", "summary": [], "text": "x"},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "x": 1},
                {"type": "function_call_output", "call_id": "1", "output": "x", "name": "f"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {}, "examples": []}],
        },
        "input.content.lang, input.name, input.text, input.x, tools.examples",
    ),
    ("/tokenize", {"prompt": "x"}, {"special": True}, "special"),
    ("/tokenize", {"messages": CHAT["messages"]}, {"special": True}, "special"),
    ("/detokenize", {"tokens": [1]}, {"skip": True}, "skip"),
    ("/tgi/tokenize", {"inputs": "x"}, {"special": True}, "special"),
    ("/tgi/chat_tokenize", CHAT, {"special": True}, "special"),
]


@pytest.mark.parametrize(
    ("path", "where", "valid"),
    [
        (path, where, valid)
        for path, _, where, valid, _ in BODIES
        if path not in ("/tokenize", "/detokenize")
    ],
    ids=lambda value: str(value)[:40],
)
def test_unknown_fields_are_reported_or_refused(
    path: str, where: str | None, valid: dict[str, Any]
) -> None:
    body = json.loads(json.dumps(valid))
    (body if where is None else body[where])["max_new_token"] = 1
    check_unknown(path, valid, body, "max_new_token")


@pytest.mark.parametrize(
    ("path", "valid", "more", "names"), NESTED, ids=lambda value: str(value)[:40]
)
def test_unknown_fields_of_objects_and_of_other_routes(
    path: str, valid: dict[str, Any], more: dict[str, Any], names: str
) -> None:
    check_unknown(path, valid, {**valid, **more}, names)


def check_unknown(path: str, valid: dict[str, Any], body: dict[str, Any], names: str) -> None:
    """Reported in the header, or refused by a server that is strict."""

    async def run(strict: bool) -> tuple[int, bytes, str]:
        options: dict[str, Any] = {"tgi": TgiOptions(), "chat_template": TEMPLATE}
        options |= configured(f"strict_requests={strict}")
        options["tgi"] = TgiOptions()
        async with serving(FakeRunner(max_model_len=512), api="lmi", **options) as served:
            known = await served.post(valid, path)
            assert known.status == 200
            assert IGNORED_HEADER not in known.headers
            answer = await served.post(body, path)
            return answer.status, answer.body, answer.headers.get(IGNORED_HEADER, "")

    status, _, header = asyncio.run(run(False))
    assert status == 200
    assert header.removeprefix("parameters.") == names
    status, text, _ = asyncio.run(run(True))
    assert status == 422
    assert b"unknown fields: " in text
    assert names.encode() in text
