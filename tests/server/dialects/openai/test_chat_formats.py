"""Chat bodies: the exact objects, in one piece, in lines and as server-sent events."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest

from lmi_core.engine.outputs import TokenEvent, TokenLogprob
from lmi_core.errors import UserError
from lmi_core.text.chat import ChatTemplate
from lmi_server.dialects.base import Call, ParsedCall
from lmi_server.dialects.lmi.lmi import parse_invocation
from lmi_server.dialects.openai.chat_schema import decode_chat, template_arguments
from tests.server.dialects.lmi.test_lmi_formats import render
from tests.server.fake_engine import FakeEngine
from tests.server.parsing import model_of

TEMPLATE = ChatTemplate(
    {"default": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"}
)
MESSAGES = [{"role": "user", "content": "Hi there"}]


def parse(accept: str = "*/*", **body: Any) -> ParsedCall:
    body = {"messages": MESSAGES, "max_tokens": 2, **body}
    raw = json.dumps(body).encode()
    call = Call(
        request_id="r", body=raw, content_type="application/json", headers={"accept": accept}
    )
    return parse_invocation(model_of(chat_template=TEMPLATE), call)


def untimed(data: bytes) -> bytes:
    """With the creation time replaced by 0."""
    created = data.split(b'"created": ', 1)[1].split(b",", 1)[0]
    return data.replace(b'"created": ' + created, b'"created": 0')


def test_prompt_is_rendered_and_gets_no_more_special_tokens() -> None:
    request = parse().requests[0]
    assert request.prompt == "user: Hi there\nassistant:"
    assert not request.add_special_tokens


def test_object() -> None:
    parsed = parse()
    assert parsed.renderer.content_type == "application/json"
    assert untimed(render(parsed)) == (
        b'{"id": "chatcmpl-r", "object": "chat.completion", "created": 0, "model": "m", '
        b'"choices": [{"index": 0, "message": {"role": "assistant", "content": " a fox"}, '
        b'"logprobs": null, "finish_reason": "length"}], "usage": {"prompt_tokens": 4, '
        b'"completion_tokens": 2, "total_tokens": 6, "prompt_tokens_details": '
        b'{"cached_tokens": 2}}}'
    )


def test_lines() -> None:
    parsed = parse(stream=True)
    assert parsed.renderer.content_type == "application/jsonlines"
    head = (
        b'{"id": "chatcmpl-r", "object": "chat.completion.chunk", "created": 0, "model": "m", '
        b'"choices": [{"index": 0, "delta": '
    )
    assert untimed(render(parsed)) == (
        head + b'{"role": "assistant", "content": " a"}, "logprobs": null, '
        b'"finish_reason": null}]}\n' + head + b'{"content": " fox"}, "logprobs": null, '
        b'"finish_reason": "length"}]}\n'
    )


def test_events_when_the_client_accepts_them() -> None:
    parsed = parse("text/event-stream", stream=True, stream_options={"include_usage": True})
    assert parsed.renderer.content_type == "text/event-stream"
    events = render(parsed).split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events[:-2]]
    assert [len(chunk["choices"]) for chunk in chunks] == [1, 1, 0]
    assert chunks[-1]["usage"]["completion_tokens"] == 2


def test_logprobs_and_choices() -> None:
    answer = json.loads(render(parse(logprobs=True, top_logprobs=2, n=2)))
    assert [choice["message"]["content"] for choice in answer["choices"]] == [
        " a fox",
        ' fox "quoted"',
    ]
    first = answer["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], first["logprob"], first["bytes"]) == (" a", -0.5, [32, 97])
    assert [top["token"] for top in first["top_logprobs"]] == ["t0", "t1"]
    assert answer["usage"]["completion_tokens"] == 4


def test_collections_pass_over_logprobs() -> None:
    """They hold the loop while they look at what many choices with the likeliest tokens keep."""
    renderer = parse(logprobs=True, top_logprobs=20).renderer
    gc.collect()
    num_before = len(gc.get_objects())
    for i in range(500):
        top = tuple(TokenLogprob(j, f"t{i} {j}", -0.5 - j) for j in range(20))
        renderer.feed(0, [TokenEvent("r", 0, i, "a", token="a", logprob=-0.5, top=top)])
    del top
    gc.collect()
    assert len(gc.get_objects()) - num_before < 200
    content = json.loads(renderer.finish())["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [20] * 500


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    request = parse(messages=[{"role": "user", "content": parts}]).requests[0]
    assert request.prompt == "user: one\ntwo\nassistant:"


def test_parameters() -> None:
    params = (
        parse(
            max_completion_tokens=7,
            temperature=0.5,
            top_p=0.9,
            seed=3,
            stop="x",
            logit_bias={"5": -100},
            presence_penalty=1,
            frequency_penalty=-1,
        )
        .requests[0]
        .params
    )
    assert (params.max_new_tokens, params.temperature, params.top_p) == (7, 0.5, 0.9)
    assert (params.seed, params.stop, params.logit_bias) == (3, ("x",), ((5, -100.0),))
    assert (params.presence_penalty, params.frequency_penalty) == (1.0, -1.0)
    assert params.logprobs is None
    defaults = parse(max_tokens=None).requests[0].params
    assert (defaults.temperature, defaults.max_new_tokens) == (1.0, None)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": "hi"}, "messages must be array"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] needs a role and a content"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\]\.content must be"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            r"messages\[0\]\.content\[0\] is 'image_url'; only text",
        ),
        ({"temperature": 3}, "temperature must be between 0 and 2, got 3"),
        ({"n": 0}, "n must be between 1 and 128, got 0"),
        ({"n": 10**400}, "n must be between 1 and 128"),
        ({"top_logprobs": 21}, "top_logprobs must be between -1 and 20"),
        ({"presence_penalty": -3}, "presence_penalty must be between -2 and 2"),
        ({"logit_bias": {"x": 1}}, "logit_bias has the keys 'x'"),
        ({"logit_bias": {"1": 101}}, "logit_bias value must be between -100 and 100"),
        ({"tools": [{}]}, r"tools\[0\] must be"),
        ({"response_format": {"type": "jsonl"}}, "must be text, json_object, json_schema or"),
    ],
)
def test_bad_bodies(body: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse(**body)


def test_error_in_mid_stream() -> None:
    lines = render(parse(stream=True), FakeEngine(fail_after=1)).splitlines()
    assert lines[-1] == b'{"code":424,"error":"step 7 failed: no such kernel"}'


@pytest.mark.parametrize(
    ("effort", "variables"),
    [
        ("low", {"reasoning_effort": "low"}),
        ("none", {"enable_thinking": False, "thinking": False}),
        (None, {}),
    ],
)
def test_templates_get_the_reasoning_effort(effort: str | None, variables: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "reasoning_effort": effort}
    given = template_arguments(decode_chat(json.dumps(body).encode()))
    names = ("reasoning_effort", "enable_thinking", "thinking")
    assert {name: given[name] for name in names if name in given} == variables
    with pytest.raises(UserError, match="reasoning_effort must be none, minimal"):
        template_arguments(decode_chat(json.dumps({**body, "reasoning_effort": "most"}).encode()))
