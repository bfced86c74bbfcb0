"""OpenAI's completions on LMI's routes."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from lmi_core.errors import UserError
from lmi_server.dialects.base import Call, ParsedCall
from lmi_server.dialects.lmi.lmi import parse_invocation
from lmi_server.dialects.lmi.options import LmiOptions
from lmi_server.dialects.lmi.release import Release
from lmi_server.dialects.unknown_fields import IGNORED_HEADER
from tests.server.dialects.lmi.test_lmi_formats import render
from tests.server.fake_engine import FakeEngine
from tests.server.harness import serving
from tests.server.parsing import model_of

BODY = {"prompt": "He is", "max_tokens": 2}


def parse(body: dict[str, Any], accept: str = "*/*", release: Release | None = None) -> ParsedCall:
    raw = json.dumps(body).encode()
    call = Call(
        request_id="r", body=raw, content_type="application/json", headers={"accept": accept}
    )
    return parse_invocation(model_of(lmi=LmiOptions(release=release)), call)


def untimed(data: bytes) -> bytes:
    return re.sub(rb'"created": \d+', b'"created": 0', data)


def test_whole() -> None:
    assert untimed(render(parse(BODY))) == (
        b'{"id": "cmpl-r", "object": "text_completion", "created": 0, "model": "m", "choices": '
        b'[{"index": 0, "text": " a fox", "logprobs": null, "finish_reason": "length"}], "usage": '
        b'{"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4, '
        b'"prompt_tokens_details": {"cached_tokens": 1}}}'
    )


def test_lines() -> None:
    parsed = parse({**BODY, "stream": True})
    assert parsed.renderer.content_type == "application/jsonlines"
    head = b'{"id": "cmpl-r", "object": "text_completion", "created": 0, "model": "m", "choices": ['
    assert untimed(render(parsed)) == (
        head + b'{"index": 0, "text": " a", "logprobs": null, "finish_reason": null}]}\n'
        + head + b'{"index": 0, "text": " fox", "logprobs": null, "finish_reason": "length"}]}\n'
    )  # fmt: skip


def test_events_where_the_client_accepts_them() -> None:
    parsed = parse({**BODY, "stream": True}, accept="text/event-stream")
    assert parsed.renderer.content_type == "text/event-stream"
    first, _, done, rest = render(parsed).split(b"\n\n")
    assert first.startswith(b'data: {"id": "cmpl-r"')
    assert (done, rest) == (b"data: [DONE]", b"")


def test_several_prompts_with_their_texts_and_unknown_fields() -> None:
    parsed = parse({**BODY, "prompt": ["a b", "c"], "echo": True, "parameters": {}})
    assert parsed.renderer.headers == {IGNORED_HEADER: "parameters"}
    choices = json.loads(render(parsed))["choices"]
    assert [choice["text"] for choice in choices] == ["a b a fox", "c a fox"]


def test_failure_in_mid_stream_is_lmis() -> None:
    data = render(parse({**BODY, "stream": True}), FakeEngine(fail_after=1))
    assert data.splitlines()[-1] == b'{"code":424,"error":"step 7 failed: no such kernel"}'


@pytest.mark.parametrize(
    ("body", "release", "words"),
    [
        ({"prompt": "a", "max_tokens": 0}, None, "max_tokens must be at least 1"),
        ({"prompt": [1, 2], "echo": True}, None, "echo of token ids is for /v1/completions"),
        ({"prompt": "a"}, Release.V0_29, "needs the field inputs"),
    ],
)
def test_refused(body: dict[str, Any], release: Release | None, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse(body, release=release)


def test_inputs_and_messages_come_first() -> None:
    assert parse({"inputs": "a", "prompt": "b"}).requests[0].prompt == "a"
    with pytest.raises(UserError, match="no chat template"):
        parse({"messages": [{"role": "user", "content": "a"}], "prompt": "b"})


def test_over_http() -> None:
    async def run() -> None:
        async with serving() as served:
            answer = await served.post(BODY)
            assert (answer.status, json.loads(answer.body)["model"]) == (200, "model")

    asyncio.run(run())
