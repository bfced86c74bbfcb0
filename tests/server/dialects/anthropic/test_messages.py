"""Anthropic's messages, to the byte, over the scripted engine and by hand-made events."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from lmi_core.engine.outputs import FinishReason
from lmi_core.text.chat import ChatTemplate
from lmi_core.tools.reasoning import REASONING
from lmi_server.dialects.anthropic.output import Message, MessageEventsRenderer, MessageRenderer
from lmi_server.dialects.anthropic.schema import chat_of, decode_messages
from lmi_server.dialects.openai.chat_schema import form_of, tools_of
from tests.server.dialects.openai.test_answer_forms import events
from tests.server.fake_engine import FakeEngine
from tests.server.harness import serving

TEMPLATE = ChatTemplate(
    {
        "default": "{{ tools }}{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{{ m.tool_calls }}{{ m.reasoning_content }}|{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}{{ enable_thinking }}"
    },
    reasoning=REASONING["qwen3"],
)
BODY: dict[str, Any] = {
    "model": "model",
    "max_tokens": 2,
    "messages": [{"role": "user", "content": "Hi there"}],
}
SCHEMA_FORMAT = {"type": "json_schema", "schema": {"type": "object"}}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}


def post(body: dict[str, Any], path: str = "/v1/messages", **options: Any) -> tuple[int, bytes]:
    engine = options.pop("engine", None)
    headers = options.pop("headers", {})

    async def run() -> tuple[int, bytes]:
        async with serving(engine, chat_template=TEMPLATE, **options) as served:
            answer = await served.post(body, path, headers=headers)
            return answer.status, re.sub(rb'"msg_[^"]*"', b'"msg_1"', answer.body)

    return asyncio.run(run())


def test_message() -> None:
    assert post(BODY) == (
        200,
        b'{"id": "msg_1", "type": "message", "role": "assistant", "model": "model", "content": '
        b'[{"type": "text", "text": " a fox"}], "stop_reason": "max_tokens", "stop_sequence": '
        b'null, "usage": {"input_tokens": 1, "cache_creation_input_tokens": 0, '
        b'"cache_read_input_tokens": 1, "output_tokens": 2}}',
    )


def test_events() -> None:
    status, body = post({**BODY, "stream": True})
    assert (status, body) == (
        200,
        b'event: message_start\ndata: {"type": "message_start", "message": {"id": "msg_1", "type": '
        b'"message", "role": "assistant", "model": "model", "content": [], "stop_reason": null, '
        b'"stop_sequence": null, "usage": {"input_tokens": 1, "cache_creation_input_tokens": 0, '
        b'"cache_read_input_tokens": 1, "output_tokens": 1}}}\n\n'
        b'event: ping\ndata: {"type": "ping"}\n\n'
        b'event: content_block_start\ndata: {"type": "content_block_start", "index": 0, '
        b'"content_block": {"type": "text", "text": ""}}\n\n'
        b'event: content_block_delta\ndata: {"type": "content_block_delta", "index": 0, "delta": '
        b'{"type": "text_delta", "text": " a"}}\n\n'
        b'event: content_block_delta\ndata: {"type": "content_block_delta", "index": 0, "delta": '
        b'{"type": "text_delta", "text": " fox"}}\n\n'
        b'event: content_block_stop\ndata: {"type": "content_block_stop", "index": 0}\n\n'
        b'event: message_delta\ndata: {"type": "message_delta", "delta": {"stop_reason": '
        b'"max_tokens", "stop_sequence": null}, "usage": {"input_tokens": 1, '
        b'"cache_creation_input_tokens": 0, "cache_read_input_tokens": 1, "output_tokens": 2}}\n\n'
        b'event: message_stop\ndata: {"type": "message_stop"}\n\n',
    )


def rendered(text: str, **fields: Any) -> dict[str, Any]:
    """The whole answer to a text, which the events must build as well."""
    body = decode_messages(json.dumps({**BODY, **fields}).encode())
    chat = chat_of(body)
    form = form_of(chat, TEMPLATE, tools_of(chat, TEMPLATE), "")
    whole, streamed = (
        kind(Message("msg_1", "m", form)) for kind in (MessageRenderer, MessageEventsRenderer)
    )
    whole.feed(0, events(text))
    answer = json.loads(whole.finish())
    frames = b"".join(streamed.feed(0, [event]) for event in events(text)) + streamed.finish()
    built = built_from(frames)
    for one in (answer, built):
        for block in one["content"]:
            block.pop("id", None)
    assert built == answer
    assert isinstance(answer, dict)
    return answer


def built_from(frames: bytes) -> dict[str, Any]:
    """As a client builds it."""
    message: dict[str, Any] = {}
    for frame in frames.decode().split("\n\n")[:-1]:
        kind, data = frame.removeprefix("event: ").split("\ndata: ")
        event = json.loads(data)
        assert event["type"] == kind
        match kind:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append({**event["content_block"], "json": ""})
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                assert event["index"] == len(message["content"]) - 1
                for name in ("text", "thinking"):
                    block |= {name: block[name] + delta[name]} if name in delta else {}
                block["json"] += delta.get("partial_json", "")
            case "content_block_stop":
                block = message["content"][event["index"]]
                written = block.pop("json")
                block |= {"input": json.loads(written)} if written else {}
            case "message_delta":
                message |= event["delta"]
                message["usage"] = event["usage"]
    return message


def test_thinking_text_and_tools() -> None:
    text = (
        "<think>Hm.</think>\nSo: <tool_call>"
        '{"name": "f", "arguments": {"a": [1]}}</tool_call><tool_call>{"name": "f"}</tool_call>'
    )
    answer = rendered(text, tools=[TOOL])
    assert answer["stop_reason"] == "tool_use"
    assert answer["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "So: "},
        {"type": "tool_use", "name": "f", "input": {"a": [1]}},
        {"type": "tool_use", "name": "f", "input": {}},
    ]


def test_calls_alone() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    answer = rendered(text, tools=[TOOL], tool_choice={"type": "any"})
    assert answer["content"] == [{"type": "tool_use", "name": "f", "input": {"a": 1}}]


def test_a_call_that_was_cut_short_is_left_out() -> None:
    body = decode_messages(json.dumps({**BODY, "tools": [TOOL]}).encode())
    chat = chat_of(body)
    renderer = MessageRenderer(
        Message("m", "m", form_of(chat, TEMPLATE, tools_of(chat, TEMPLATE), ""))
    )
    cut = events('Hm. <tool_call>{"name": "f", "arguments": {"a": ')
    cut[-1].finish_reason = FinishReason.LENGTH
    renderer.feed(0, cut)
    answer = json.loads(renderer.finish())
    assert answer["content"] == [{"type": "text", "text": "Hm. "}]
    assert answer["stop_reason"] == "max_tokens"


def test_stop_sequences() -> None:
    body = decode_messages(json.dumps({**BODY, "stop_sequences": ["END"]}).encode())
    assert chat_of(body).stop == ["END"]
    message = Message("m", "m", None)
    ended = events("a")
    ended[-1].finish_reason, ended[-1].stop = FinishReason.STOP, "END"
    message.add(ended[-1])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")


def test_the_prompt() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "text", "text": "Calling."},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "7"}]},
        {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True},
        {"type": "text", "text": "Go on", "cache_control": {"type": "ephemeral"}},
    ]
    body = {
        **BODY,
        "system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}],
        "messages": [
            {"role": "user", "content": "Go"},
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": results},
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "max_tokens": 2048,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "max"},
    }
    chat = chat_of(decode_messages(json.dumps(body).encode()))
    assert [message["role"] for message in chat.messages] == [
        "system", "user", "assistant", "tool", "tool", "user",
    ]  # fmt: skip
    system, _, said, seven, failed, last = chat.messages
    assert system["content"] == "Be\nbrief"
    assert (said["reasoning_content"], said["content"]) == ("Hm.", "Calling.")
    assert said["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert (seven["tool_call_id"], seven["content"]) == ("t1", "7")
    assert failed["content"] == "Error: no"
    assert last["content"] == "Go on"
    assert (chat.tool_choice, chat.parallel_tool_calls) == ("required", False)
    assert chat.chat_template_kwargs == {
        "enable_thinking": True,
        "thinking": True,
        "thinking_budget": 1024,
        "reasoning_effort": "high",
    }
    assert chat.tools[0]["function"]["parameters"] == {"type": "object"}  # type: ignore[index]


def test_an_answer_that_is_begun_is_gone_on_with() -> None:
    messages = [*BODY["messages"], {"role": "assistant", "content": "He"}]
    chat = chat_of(decode_messages(json.dumps({**BODY, "messages": messages}).encode()))
    assert chat.continue_final_message
    assert not chat.add_generation_prompt


def test_a_budget_for_thinking_is_kept() -> None:
    engine = FakeEngine()
    thinking = {"type": "enabled", "budget_tokens": 7}
    assert post({**BODY, "max_tokens": 8, "thinking": thinking}, engine=engine)[0] == 200
    budget = engine.requests[0].params.thinking
    assert budget is not None
    assert (budget.num_tokens, budget.end, budget.is_open) == (7, "</think>", False)
    for changes, said in (
        ({}, "max_tokens must be more than thinking.budget_tokens (7), got 2"),
        ({"thinking": {**thinking, "budget_tokens": 0}}, "thinking.budget_tokens must be at least"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format must be"),
        ({"output_format": {"type": "json_schema"}}, "output_format must be"),
    ):
        body = {**BODY, "thinking": thinking, "max_tokens": 8 if changes else 2, **changes}
        status, answer = post(body)
        assert status == 400
        error = json.loads(answer)["error"]
        assert (error["type"], error["message"][: len(said)]) == ("invalid_request_error", said)


def test_the_format_of_an_answer() -> None:
    for form in ({"output_config": {"format": SCHEMA_FORMAT}}, {"output_format": SCHEMA_FORMAT}):
        engine = FakeEngine()
        assert post({**BODY, **form}, engine=engine)[0] == 200
        grammar = engine.requests[0].params.grammar
        assert grammar is not None
        assert (grammar.text, grammar.field) == ('{"type":"object"}', "output_config.format")
        assert grammar.instead is None
        assert post({**BODY, **form, "tools": [TOOL]}, engine=engine)[0] == 200
        grammar = engine.requests[-1].params.grammar
        assert grammar is not None
        assert (grammar.field, grammar.instead is not None) == ("output_config.format", True)


def test_tokens_are_counted() -> None:
    body = {name: BODY[name] for name in ("model", "messages")}
    status, answer = post(body, "/v1/messages/count_tokens")
    assert (status, json.loads(answer)) == (200, {"input_tokens": 2})


IMAGE = {"type": "image", "source": {"type": "base64", "data": "", "media_type": "image/png"}}


@pytest.mark.parametrize(
    ("changes", "status", "kind", "words"),
    [
        ({"messages": []}, 400, "invalid_request_error", "messages is empty"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens must be at least 1"),
        ({"temperature": 1.5}, 400, "invalid_request_error", "between 0 and 1"),
        ({"model": "other"}, 404, "not_found_error", "'other' does not exist"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "invalid_request_error",
         "messages[0].content[0] is 'image'; only text is available"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, 400,
         "invalid_request_error", "is 'document'"),
        ({"messages": [{"role": "system", "content": "x"}]}, 400, "invalid_request_error",
         "messages[0].role must be user or assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, 400,
         "invalid_request_error", "tool_use_id"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, 400, "invalid_request_error",
         "tools[0].type is 'web_search_20250305'"),
        ({"tools": [{"name": "f"}]}, 400, "invalid_request_error", "input_schema"),
        ({"tool_choice": {"type": "some"}}, 400, "invalid_request_error", "tool_choice must be"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, 400,
         "invalid_request_error", "'g'"),
        ({"thinking": {"type": "maybe"}}, 400, "invalid_request_error", "thinking.type"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences"),
        ({"stop_sequences": ["x"] * 1025}, 400, "invalid_request_error", "stop_sequences has 1025"),
        ({"system": [IMAGE]}, 400, "invalid_request_error", "system[0] is 'image'"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
    ],
)  # fmt: skip
def test_errors(changes: dict[str, Any], status: int, kind: str, words: str) -> None:
    answered, body = post({**BODY, **changes})
    answer = json.loads(body)
    assert (answered, answer["type"], answer["error"]["type"]) == (status, "error", kind)
    assert words in answer["error"]["message"]


def test_failures() -> None:
    status, body = post(BODY, engine=FakeEngine(fail_after=0))
    assert (status, json.loads(body)["error"]["type"]) == (500, "api_error")
    status, body = post({**BODY, "stream": True}, engine=FakeEngine(fail_after=1))
    assert status == 200
    last = body.split(b"\n\n")[-2]
    assert last.startswith(b'event: error\ndata: {"type": "error", "error": {"type": "api_error"')
    status, body = post(BODY, engine=FakeEngine(max_running=0))
    assert (status, json.loads(body)["error"]["type"]) == (429, "rate_limit_error")


def test_keys() -> None:
    for headers, status in (({"x-api-key": "k"}, 200), ({"x-api-key": "no"}, 401), ({}, 401)):
        answered, body = post(BODY, api_keys=("k",), headers=headers)
        assert answered == status
        assert status == 200 or json.loads(body)["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("api", ["lmi", "openai"])
def test_where_it_is(api: str) -> None:
    assert post(BODY, api=api)[0] == 200
    assert post(BODY, "/anthropic/v1/messages", api=api)[0] == 200
    status, body = post(BODY, "/v1/messages/other", api=api)
    assert (status, json.loads(body)["error"]["type"]) == (404, "not_found_error")
    status, body = post(BODY, "/v1/other", api=api)
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
